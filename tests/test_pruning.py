"""Rejection sampling keeps the target's law whatever is pruned, trimmed or drafted ahead, if it is causal.

Joint chi-squares of the first tokens through the real scheduler, pipeline, sampler and acceptance. The same test
fails, decisively, for rules that look ahead, that mistake a pruned row for a rejection, or that share noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from faser_backend.core.batch import SamplingRows
from faser_backend.core.decision import Decision, PipelineMode, Pruner
from faser_backend.core.frontier import Acceptance
from faser_backend.core.record import StepRecord
from faser_backend.pipeline import step, verify
from faser_backend.pipeline.rows import DecodeBatch
from faser_backend.policy import acceptance, trim
from faser_backend.policy.registry import parse_policy
from tests.fakes import SequentialLanes
from tests.forcing import (
    Change,
    Forced,
    always,
    at_random,
    by_parity,
    calibrated,
    forced,
    outside_top,
    peeking,
    random_everything,
    rule,
)
from tests.harness import FakeEngine, drive, guessed, open_fake
from tests.law import exact_law, observed, p_value
from tests.test_engine import random_requests

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode
VOCAB, LENGTH, COUNT, BATCH = 4, 3, 2500, 48
LAYERS = (1, 1, 1)
PASSES, FAILS = 1e-3, 1e-6
# A draft token behind its best rival has a chance of 0.4, else 0.95. One row of two weak tokens is no gain, of a
# weak and a strong one it is: what is best for row 1 depends on draft token 2.
STEPPED = rule([0.4, 0.95], [1.0, 1.65, 1.65, 1.65], price=1.0, first_knot=-1e-6, knot_step=1e-6)


def law_p_value(
    change: Change, policy: str = "fixed:3", *, num_at_once: int = BATCH, count: int = COUNT
) -> tuple[float, FakeEngine]:
    fake = open_fake(
        Forced(parse_policy(policy, guessed), change),
        lanes=SequentialLanes(verifies_first=True),
        num_layers=LAYERS,
        uses_rejection=True,
        vocab_size=VOCAB,
        draft_noise=4.0,
        max_num_seqs=num_at_once,
        num_blocks=8 * num_at_once,
        max_prefill_tokens=200,
    )
    modes, num_ahead = set(), 0

    def note(record: StepRecord) -> None:
        nonlocal num_ahead
        modes.add(record.plan.decision.mode)
        num_ahead += len(set(record.plan.decodes) & set(record.plan.drafts))

    fake.stepper.observers.append(note)
    # Running ahead of two draft tokens takes room for a third, and for the token that ends its round.
    length = LENGTH + 1 if RUN_AHEAD in modes_of(change) else LENGTH
    counts = observed(fake.engine, VOCAB, length, count, num_at_once=num_at_once)
    assert RUN_AHEAD not in modes or num_ahead > count // 20, "nothing ran ahead"
    return p_value(counts, exact_law(VOCAB, length)), fake


def modes_of(change: Change) -> set[PipelineMode]:
    """What a change decides for one sequence; random ones may decide anything."""
    return {change(Decision([3])).mode for _ in range(20)}


CAUSAL: dict[str, Callable[[], Pruner]] = {
    "parity": lambda: by_parity(num_candidates=3),
    "always": lambda: always(num_candidates=3),
    "exit margin": lambda: outside_top(num_candidates=3),
    "exit margin, two exits": lambda: outside_top(-0.5, exits=(0, 1), num_candidates=2),
    "as calibrated": lambda: calibrated(0.5, num_candidates=3),
    "random": lambda: at_random(np.random.default_rng(3), num_candidates=3),
}


@pytest.mark.parametrize("mode", [SERIAL, RUN_AHEAD])
@pytest.mark.parametrize("pruner", CAUSAL)
def test_causal_pruning_keeps_the_law(pruner: str, mode: PipelineMode):
    p, fake = law_p_value(forced(mode, pruner=CAUSAL[pruner]()), "fixed:3" if mode is SERIAL else "fixed:2")
    assert p > PASSES
    assert fake.engine.metrics().num_pruned > COUNT // 10


@pytest.mark.parametrize("policy", ["fixed:1", "fixed:2"])
@pytest.mark.parametrize("mode", [RUN_AHEAD, PING_PONG])
def test_overlap_keeps_the_law(mode: PipelineMode, policy: str):
    p, _ = law_p_value(forced(mode), policy)
    assert p > PASSES


@pytest.mark.parametrize("mode", PipelineMode)
def test_trimming_keeps_the_law(mode: PipelineMode):
    p, fake = law_p_value(forced(mode, trim=STEPPED), "fixed:2")
    assert p > PASSES
    metrics = fake.engine.metrics()
    num_whole = sum(LAYERS) * (metrics.num_drafted + metrics.num_emitted - metrics.num_accepted)
    assert metrics.num_row_layers < num_whole, "nothing was trimmed"


@pytest.mark.parametrize("seed", range(2))
def test_any_mix_keeps_the_law(seed: int):
    p, _ = law_p_value(random_everything(seed, longest=3, most_candidates=VOCAB))
    assert p > PASSES


@pytest.mark.parametrize("seed", range(3))
def test_no_two_draws_share_their_noise(seed: int):
    """Whatever is discarded, preempted or drafted again: each (request, position, purpose, round) is drawn once."""
    fake = open_fake(
        Forced(parse_policy("fixed:4", guessed), random_everything(seed)),
        lanes=SequentialLanes(verifies_first=True),
        num_layers=LAYERS,
        num_blocks=26,
        uses_rejection=True,
    )
    sampler, drawn = fake.stepper.sampler, Counter()
    real = sampler.uniforms

    def noting(rows: SamplingRows, purpose: int, num_steps: np.ndarray) -> np.ndarray:
        request_of = {sequence.slot: sequence.request.request_id for sequence in fake.stepper.scheduler.running}
        for slot, position, number in zip(rows.slots.tolist(), rows.positions.tolist(), num_steps, strict=True):
            drawn[request_of[slot], position, purpose, int(number)] += 1
        return real(rows, purpose, num_steps)

    sampler.uniforms = noting  # type: ignore[method-assign]
    drive(fake.engine, random_requests(seed, 12), seed=seed)
    assert len(drawn) > 300 and max(drawn.values()) == 1
    assert fake.engine.metrics().num_preemptions > 0


# -- negative controls -----------------------------------------------------------------------------------


def test_pruning_by_later_tokens_is_caught():
    p, _ = law_p_value(forced(pruner=peeking(num_candidates=3)))
    assert p < FAILS


def test_trimming_by_later_tokens_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The best set of rows over whole chains: right for sample-and-match, but it judges row 1 by token 2."""
    monkeypatch.setattr(step, "admit_by_price", trim.admit)
    p, _ = law_p_value(forced(trim=STEPPED), num_at_once=1, count=5000)
    assert p < FAILS


def _wrong_at_pruned_rows(redraw: Callable[[np.ndarray, np.ndarray], np.ndarray]):
    """accept_by_rejection, but x_N is replaced where row N was pruned: redraw(p, q) gives the weights."""
    real = acceptance.accept_by_rejection

    def wrong(frontier, target_probs, cu_rows, accept_uniforms, sample_uniforms, *, num_kept) -> Acceptance:
        result = real(frontier, target_probs, cu_rows, accept_uniforms, sample_uniforms, num_kept=num_kept)
        for b in np.flatnonzero((num_kept <= frontier.num_drafted) & (result.num_accepted >= num_kept - 1)):
            last = num_kept[b] - 1
            row = cu_rows[b] + last
            weights = redraw(target_probs[row], frontier.draft_probs[b, last])
            result.tokens[b, last] = acceptance.draw(weights[None], sample_uniforms[row : row + 1])[0]
            result.num_accepted[b], result.num_emitted[b] = last, last + 1
        return result

    return wrong


@pytest.mark.parametrize(
    "redraw",
    [lambda p, q: p, lambda p, q: acceptance._residual(p[None], q[None])[0]],
    ids=["sampled afresh", "taken as rejected"],
)
def test_replacing_the_token_before_a_pruned_row_is_caught(monkeypatch: pytest.MonkeyPatch, redraw):
    monkeypatch.setattr(verify, "accept_by_rejection", _wrong_at_pruned_rows(redraw))
    p, _ = law_p_value(forced(pruner=by_parity(num_candidates=3)))
    assert p < FAILS


def test_discarding_chains_for_their_own_tokens_is_caught(monkeypatch: pytest.MonkeyPatch):
    """A chain ahead may be discarded because of what came before it alone."""
    real = step.surviving

    def choosy(*arguments):
        ahead = real(*arguments)
        return ahead.take(np.flatnonzero(ahead.frontier.drafted[:, :1].ravel() % 2 == 0).tolist())

    monkeypatch.setattr(step, "surviving", choosy)
    p, _ = law_p_value(forced(RUN_AHEAD), "fixed:2")
    assert p < FAILS


@pytest.mark.parametrize("mode", [SERIAL, RUN_AHEAD])
def test_noise_shared_by_drafts_and_tests_is_caught(monkeypatch: pytest.MonkeyPatch, mode: PipelineMode):
    zeros = property(lambda batch: np.zeros(len(batch), np.int64))
    monkeypatch.setattr(DecodeBatch, "rounds", zeros)
    monkeypatch.setattr(DecodeBatch, "draft_rounds", zeros)
    monkeypatch.setattr(verify, "PURPOSE_ACCEPT", verify.PURPOSE_RECOVER)
    monkeypatch.setattr("faser_backend.pipeline.draft.PURPOSE_DRAFT", verify.PURPOSE_RECOVER)
    p, _ = law_p_value(forced(mode), "fixed:2")
    assert p < FAILS
