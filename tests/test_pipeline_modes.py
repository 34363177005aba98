"""Tokens do not depend on how a step is run: mode, partition, lanes, lengths, trimming, early exit, or any mix.

The same requests as in test_engine.py, with a target of three segments, against plain decoding alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from faser_backend.core.decision import PipelineMode
from faser_backend.core.record import StepRecord
from faser_backend.policy.registry import policy_usages
from tests.forced_engine import LANES, LAYERS, Case, agrees, open_forced
from tests.forcing import (
    ADMITS_ALL,
    ADMITS_NOTHING,
    alternating,
    always,
    at_random,
    by_parity,
    calibrated,
    forced,
    outside_top,
    random_everything,
    random_lengths,
    random_rule,
)
from tests.harness import request
from tests.test_engine import alone, random_requests

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode
# Trees run in turn alone.
POLICIES = [{"fixed": "fixed:4"}.get(name, name) for name in policy_usages() if name != "tree"]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    many = [random_requests(seed, 12) for seed in range(2)]
    return [Case(requests, alone(requests)) for requests in many]


# -- equality --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", PipelineMode)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_in_every_mode(cases: list[Case], policy: str, mode: PipelineMode):
    for seed, num_blocks in enumerate([200, 26]):
        fake = open_forced(policy, forced(mode), num_blocks=num_blocks)
        result = agrees(fake, cases[seed], seed)
        for r in cases[seed].requests:
            assert len(result.log_probs[r.request_id]) == len(result.tokens[r.request_id]) * r.wants_log_probs


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("mode", [RUN_AHEAD, PING_PONG])
@pytest.mark.parametrize("num_blocks", [200, 26])
def test_lengths_of_their_own_in_every_order(cases: list[Case], lanes: str, mode: PipelineMode, num_blocks: int):
    num_preemptions = 0
    for seed, case in enumerate(cases):
        fake = open_forced("fixed:4", random_lengths(seed, mode), LANES[lanes](), num_blocks=num_blocks)
        agrees(fake, case, seed)
        num_preemptions += fake.engine.metrics().num_preemptions
    assert (num_preemptions > 0) == (num_blocks < 200)


PRUNERS = {
    "random": lambda seed: at_random(np.random.default_rng(seed), exits=(0, 1)),
    "always": lambda _: always(),
    "always, late": lambda _: always(exits=(1,)),
    "parity": lambda _: by_parity(),
    "outside top": lambda _: outside_top(num_candidates=8),
    "as calibrated": lambda _: calibrated(0.6, segments=(0, 1)),
    "outside top, two exits": lambda _: outside_top(-2.0, exits=(0, 1), num_candidates=3),
}


@pytest.mark.parametrize("mode", PipelineMode)
@pytest.mark.parametrize("pruner", PRUNERS)
def test_early_exit(cases: list[Case], pruner: str, mode: PipelineMode):
    for seed, num_blocks in enumerate([200, 30]):
        fake = open_forced("fixed:4", forced(mode, pruner=PRUNERS[pruner](seed)), num_blocks=num_blocks)
        agrees(fake, cases[seed], seed)
        metrics = fake.engine.metrics()
        assert metrics.num_pruned > 0
        assert metrics.num_row_layers < sum(LAYERS) * (metrics.num_drafted + metrics.num_emitted)


@pytest.mark.parametrize("mode", PipelineMode)
@pytest.mark.parametrize("trim", ["all", "nothing", *range(6)])
def test_trimming(cases: list[Case], trim: str | int, mode: PipelineMode):
    rules = {"all": ADMITS_ALL, "nothing": ADMITS_NOTHING}
    chosen = rules[trim] if isinstance(trim, str) else random_rule(np.random.default_rng(trim))
    fake = open_forced("fixed:4", forced(mode, trim=chosen), num_blocks=40)
    agrees(fake, cases[0], 1)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("num_blocks", [200, 40, 26])
@pytest.mark.parametrize("seed", range(4))
def test_everything_may_change_at_every_step(cases: list[Case], lanes: str, num_blocks: int, seed: int):
    fake = open_forced("fixed:4", random_everything(seed), LANES[lanes](), num_blocks=num_blocks)
    agrees(fake, cases[seed % len(cases)], seed)


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_any_number_of_sequences(count: int):
    requests = random_requests(100 + count, count)
    case = Case(requests, alone(requests))
    for mode in PipelineMode:
        agrees(open_forced("fixed:3", forced(mode), max_num_seqs=32), case, None)
    for seed in range(3):
        agrees(open_forced("fixed:3", random_everything(seed), max_num_seqs=32), case, seed)


@pytest.mark.parametrize("mode", [RUN_AHEAD, PING_PONG])
def test_reused_prefixes(mode: PipelineMode):
    prompt = list(range(20)) * 2
    requests = [request(f"r{i}", [*prompt, i % 4], 12, max_draft_tokens=0 if i == 1 else None) for i in range(8)]
    fake = open_forced("fixed:4", alternating(forced(mode), forced(mode, pruner=by_parity())))
    agrees(fake, Case(requests, alone(requests)), 0)
    assert fake.engine.metrics().num_reused_blocks > 0


# -- what speculation is for -----------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("mode", [RUN_AHEAD, PING_PONG, "any"])
def test_a_perfect_draft_is_never_rejected(mode: PipelineMode | str, lanes: str):
    """So the draft's KV is whole and its penalties see every token, whatever was drafted, discarded or pruned."""
    requests = random_requests(50, 12)
    change = random_lengths(0, mode) if isinstance(mode, PipelineMode) else random_everything(0)
    fake = open_forced("fixed:4", change, LANES[lanes](), num_blocks=40, draft_noise=0.0, draft_memory=10**6)

    def all_tested_are_accepted(record: StepRecord) -> None:
        assert (record.acceptance.num_accepted == record.num_testable).all()

    fake.stepper.observers.append(all_tested_are_accepted)
    agrees(fake, Case(requests, alone(requests)), 0)
    assert fake.engine.metrics().num_accepted > 50


@pytest.mark.parametrize(("mode", "count"), [(RUN_AHEAD, 1), (PING_PONG, 2), (PING_PONG, 5)])
def test_overlapped_steps_draft_beside_verification(mode: PipelineMode, count: int):
    requests = [request(f"r{i}", [1, 2, 3 + i], 40) for i in range(count)]
    fake = open_forced("fixed:3", forced(mode), draft_noise=0.0, draft_memory=10**6)
    shares = []

    def note(record: StepRecord) -> None:
        shares.append(bool(record.plan.drafts))
        in_both = set(record.plan.drafts) & set(record.plan.decodes)
        assert not in_both if mode is PING_PONG else len(in_both) == len(record.plan.drafts)

    fake.stepper.observers.append(note)
    agrees(fake, Case(requests, alone(requests)), None)
    assert np.mean(shares) > 0.6


def test_running_ahead_discards_after_a_rejection_alone():
    """With a perfect draft each token is drafted once; a useless one drafts again and again."""
    requests = [request("r", [1, 2, 3], 40)]
    perfect = open_forced("fixed:4", forced(RUN_AHEAD), draft_noise=0.0, draft_memory=10**6)
    agrees(perfect, Case(requests, alone(requests)), None)
    assert perfect.drafts[1].num_calls <= 40
    useless = open_forced("fixed:4", forced(RUN_AHEAD), draft_noise=100.0)
    agrees(useless, Case(requests, alone(requests)), None)
    assert useless.drafts[1].num_calls > 100
