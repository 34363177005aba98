"""Engines whose draft, an EAGLE-3 head or a block drafter, reads what the target made of each token.

What they draft equals a dense reference, what they emit plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import pytest

from faser_backend.core.batch import RowBatch
from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.plan import StepRecord
from faser_backend.core.request import Request, Sampling
from faser_backend.pipeline.engine import Engine, EngineMetrics
from faser_backend.policy.calibration import DrafterChoice
from faser_backend.serving.compose import build_engine
from tests.engines.test_eagle3 import Built
from tests.support.block_models import KINDS, BuiltBlocks
from tests.support.forcing import Forced, at_random, forced, in_turns
from tests.support.harness import drive, request
from tests.support.tiny_models import VOCAB_SIZE

AnyBuilt = Built | BuiltBlocks


@pytest.fixture(scope="module", params=["eagle3", "dflash", "dspark"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyBuilt:
    root = tmp_path_factory.mktemp("drafts")
    if request.param == "eagle3":
        return Built(root, exit_layers=(4,))
    return BuiltBlocks(root, options={"exit_layers": (4,)}, **KINDS[request.param])


def make_requests(count: int = 8, *, is_greedy: bool = False, num_shared: int = 0) -> list[Request]:
    """Prompts of 1 token and more; every second request samples, unless all are greedy."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB_SIZE, num_shared).tolist()
    requests = []
    for index in range(count):
        prompt = shared + rng.integers(0, VOCAB_SIZE, 1 if index == 0 else int(rng.integers(2, 40))).tolist()
        sampling = Sampling(temperature=0.0 if is_greedy or index % 2 else 1.0, seed=index)
        requests.append(request(f"r{index}", prompt, 16, sampling=sampling))
    return requests


def open_engine(built: AnyBuilt, policy: str, **options: object) -> Engine:
    fields = {"policy": policy, "max_num_seqs": 4, "max_prefill_tokens": 16, **options}
    return build_engine(built.directory, EngineConfig.from_options(**fields))


def tokens_of(built: AnyBuilt, policy: str, requests: list[Request], **options: object) -> dict[str, list[int]]:
    engine = open_engine(built, policy, **options)
    tokens = drive(engine, requests).tokens
    # What adaptive policies draft depends on how long calls took.
    assert not policy.startswith("fixed") or engine.metrics().num_drafted > 0
    engine.close()
    return tokens


@cache
def plain_tokens(built: AnyBuilt, count: int = 8, **kind: Any) -> dict[str, list[int]]:
    return tokens_of(built, "none", make_requests(count, **kind))


@cache
def reference_chain(built: AnyBuilt, tokens: tuple[int, ...], count: int) -> list[int]:
    return built.chain_behind(np.array(tokens), count)


class ChainChecker:
    """Compares every chain that an engine verifies with the reference's, look-ups aside."""

    def __init__(self, built: AnyBuilt) -> None:
        self.built = built
        self.num_equal = self.num_chains = 0

    def observe(self, record: StepRecord) -> None:
        frontier = record.frontier
        for row, sequence in enumerate(record.plan.decodes):
            if not frontier.is_main[row]:
                continue
            count, num_tokens = int(frontier.num_drafted[row]), int(record.num_tokens[row])
            assert count == 0 or num_tokens > 1
            if count:
                wanted = reference_chain(self.built, tuple(sequence.token_ids[:num_tokens].tolist()), count)
                self.num_equal += frontier.drafted[row, :count].tolist() == wanted
                self.num_chains += 1


def checked(built: AnyBuilt, policy: str, **options: object) -> tuple[Engine, ChainChecker]:
    """Opens an engine whose chains are compared."""
    engine, checker = open_engine(built, policy, **{"enable_prefix_reuse": False, **options}), ChainChecker(built)
    engine.step_runner.observers.append(checker.observe)
    return engine, checker


def check_chains(
    built: AnyBuilt,
    policy: str,
    prepare: Callable[[Engine], None] = lambda engine: None,
    count: int = 8,
    num_shared: int = 0,
    **options: object,
) -> EngineMetrics:
    """Asserts that chains of greedy requests are the reference's, and tokens those of plain decoding."""
    engine, checker = checked(built, policy, **options)
    prepare(engine)
    tokens = drive(engine, make_requests(count, is_greedy=True, num_shared=num_shared)).tokens
    metrics = engine.metrics()
    engine.close()
    assert checker.num_equal == checker.num_chains > 10
    assert tokens == plain_tokens(built, count, is_greedy=True, num_shared=num_shared)
    return metrics


def set_lengths(lengths: tuple[int, ...], engine: Engine) -> None:
    """Lets the engine's steps draft these lengths in turns."""
    scheduler = engine.step_runner.scheduler
    scheduler.policy = Forced(scheduler.policy, in_turns(*lengths))


def prune(engine: Engine, **decisions: bool) -> None:
    """Lets half of the drafted rows leave at the exit."""
    scheduler = engine.step_runner.scheduler
    pruner = at_random(np.random.default_rng(0), exits=(0,), share=0.5)
    scheduler.policy = Forced(scheduler.policy, forced(pruner=pruner, **decisions))


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((1,), {}),
        ((4,), {}),
        ((4,), {"num_kv_blocks": 32}),  # one full context: sequences are preempted
        ((5, 0, 2, 0, 0), {}),  # rounds without drafts: the head lags behind
    ],
)
def test_every_chain_is_the_reference_s(built: AnyBuilt, lengths: tuple[int, ...], options: dict[str, object]) -> None:
    metrics = check_chains(built, "fixed:4", partial(set_lengths, lengths), **options)
    assert (metrics.num_preemptions > 0) == bool(options)


def test_chains_beside_look_ups_are_the_reference_s(built: AnyBuilt, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head reads later what it missed while n-grams drafted; tokens equal plain decoding's."""
    monkeypatch.setattr(DrafterChoice, "takes_look_up", lambda self, found, *_: found.num_drafted > 0)
    metrics = check_chains(built, "fixed:3", draft="model+ngram")
    assert metrics.num_drafted_by_source["ngram"] > 10


@pytest.mark.parametrize("shift", [0, 1])
def test_clients_chains_go_beside_a_head_s(built: AnyBuilt, shift: int) -> None:
    """Right ones and those that go wrong somewhere. The head has not run them: it catches up from the target's states,
    and what it drafts behind them is the reference's."""
    expected = plain_tokens(built, is_greedy=True)
    requests = make_requests(is_greedy=True)
    for index in range(0, len(requests), 2):
        right = expected[requests[index].request_id][:6]
        guess = [(token + shift * (place >= index)) % VOCAB_SIZE for place, token in enumerate(right)]
        requests[index] = replace(requests[index], draft_ids=tuple(guess))
    engine, checker = checked(built, "fixed:4")
    result = drive(engine, requests)
    engine.close()
    assert result.tokens == expected
    assert checker.num_equal == checker.num_chains > 20
    stats = result.final[requests[0].request_id].stats
    assert stats is not None and (stats.num_accepted >= 6 or shift)


def test_features_of_other_positions_are_noticed(built: AnyBuilt) -> None:
    """Negative control: a head whose features lie one place further on drafts other chains."""
    engine, checker = checked(built, "fixed:3")
    head = cast(Any, engine.step_runner.partitions[WHOLE].draft)
    target_features, run = head.pool.features, head.run_segment

    def run_on_others(segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        head.pool.features = {layer: np.roll(rows_of, 1, axis=1) for layer, rows_of in target_features.items()}
        return run(segment, rows, hidden)

    head.run_segment = run_on_others
    drive(engine, make_requests(is_greedy=True))
    engine.close()
    assert checker.num_equal < 0.5 * checker.num_chains


def test_prefixes_that_are_reused_are_drafted_behind(built: AnyBuilt) -> None:
    """A reused row may hold another sequence's next token, so that a few chains differ; features are never missing."""
    requests = make_requests(12, is_greedy=True, num_shared=20)
    engine, checker = checked(built, "fixed:3", enable_prefix_reuse=True)
    tokens = drive(engine, requests).tokens
    assert engine.metrics().num_reused_blocks > 0
    engine.close()
    assert 0.8 * checker.num_chains < checker.num_equal
    assert tokens == tokens_of(built, "none", requests)


@pytest.mark.parametrize("prefills_draft", [True, False])
def test_rows_that_leave_at_an_exit_leave_no_hole(built: AnyBuilt, prefills_draft: bool) -> None:
    """A pruned row has the features of the layers before the exit alone; its token is not committed with it. And a
    head that has read no prompt catches up before it drafts."""
    pruning = partial(prune, prefills_draft=prefills_draft)
    assert check_chains(built, "fixed:5", pruning).num_pruned > 0


@pytest.mark.parametrize("policy", ["fixed:4", "goodput", "survival", "faser", "gp-lcb"])
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 32, "draft": "model+ngram"}, {"pipeline": "run_ahead"}])
def test_tokens_equal_plain_decoding(built: AnyBuilt, policy: str, options: dict[str, object]) -> None:
    assert tokens_of(built, policy, make_requests(num_shared=9), **options) == plain_tokens(built, num_shared=9)


def test_overlap_is_refused_with_its_reason(built: AnyBuilt, caplog: pytest.LogCaptureFixture) -> None:
    engine = open_engine(built, "fixed:2", pipeline="ping_pong")
    assert list(engine.step_runner.partitions) == [WHOLE]
    engine.close()
    assert "pipeline = ping_pong" in caplog.text and "EAGLE-3 head" in caplog.text


def test_rejection_sampling_takes_a_head_s_distribution(built: AnyBuilt) -> None:
    greedy = tokens_of(built, "fixed:4", make_requests(is_greedy=True), acceptance="rejection")
    assert greedy == plain_tokens(built, is_greedy=True)
    sampled = tokens_of(built, "fixed:4", make_requests(), acceptance="rejection")
    assert {len(tokens) for tokens in sampled.values()} == {16}
