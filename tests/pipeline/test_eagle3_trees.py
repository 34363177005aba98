"""Trees that an EAGLE-3 head drafts: each node's children equal a dense reference's, tokens those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import Decision
from faser_backend.core.record import StepRecord
from faser_backend.core.request import FinishReason
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.runner import LlvmHeadRunner
from faser_backend.device.runtime import ModelPair
from faser_backend.engines.build import build_engines
from faser_backend.pipeline import head
from faser_backend.pipeline.draft_tree import node_rows
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.head import HeadProposer
from faser_backend.policy.registry import parse_policy
from faser_backend.serving.compose import assemble_on, build_engine
from faser_backend.serving.runtimes import open_runtime
from tests.engines.test_eagle3 import BLOCK_SIZE, Built
from tests.pipeline.test_eagle3_drafting import make_requests, open_engine, tokens_of
from tests.support.forcing import Change, Forced, alternating, forced
from tests.support.harness import drive, guessed
from tests.support.head_trees import Agreeing, TreeChecker
from tests.support.tiny_models import VOCAB_SIZE

POLICIES = ("tree:1", "tree:5", "tree:12", "tree:63")


@pytest.fixture(autouse=True)
def _trees_are_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' head is surer than a trained one."""
    monkeypatch.setattr(HeadProposer, "difference", 0.7)


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Whose head knows some tokens alone and is hardly ever right."""
    return Built(tmp_path_factory.mktemp("random"), runtime="llvm", exit_layers=(4,))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Agreeing(tmp_path_factory.mktemp("agreeing"))


@pytest.fixture(scope="module")
def plain(built: Built) -> dict[str, list[int]]:
    return tokens_of(built, "none", make_requests())


def checked(built: Built, policy: str, **options: object) -> tuple[Engine, TreeChecker]:
    engine = open_engine(built, policy, **options)
    return engine, TreeChecker(built, engine)


def rest(decision: Decision) -> Decision:
    return replace(decision, num_draft_tokens=[0] * len(decision.num_draft_tokens))


def checked_as_forced(built: Built, policy: str, change: Change) -> tuple[Engine, TreeChecker]:
    config = EngineConfig(max_num_seqs=4, max_prefill_tokens=16, enable_prefix_reuse=False)
    models = ModelPair(built.manifest.target, built.manifest.draft)
    runtime = open_runtime(built.directory, built.manifest, config)
    engine = assemble_on(runtime, models, Forced(parse_policy(policy, guessed), change), config)
    return engine, TreeChecker(built, engine)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 32}])
def test_every_tree_is_the_reference_s(built: Built, policy: str, options: dict[str, object]) -> None:
    engine, checker = checked(built, policy, enable_prefix_reuse=False, **options)
    tokens = drive(engine, make_requests(is_greedy=True)).tokens
    metrics = engine.metrics()
    engine.close()
    assert (metrics.num_preemptions > 0) == bool(options)
    assert checker.num_equal == checker.num_parents > 50
    assert metrics.num_accepted > 30
    if policy != "tree:1":
        assert min(checker.num_siblings, checker.num_deep) > 30 and checker.num_moved > 10
    assert tokens == tokens_of(built, "none", make_requests(is_greedy=True))


def test_trees_of_a_head_that_knows_some_tokens_are_the_reference_s(random: Built) -> None:
    engine, checker = checked(random, "tree:12", enable_prefix_reuse=False)
    tokens = drive(engine, make_requests(is_greedy=True)).tokens
    engine.close()
    assert checker.num_equal == checker.num_parents > 50 and min(checker.num_siblings, checker.num_deep) > 30
    assert tokens == tokens_of(random, "none", make_requests(is_greedy=True))


@pytest.mark.parametrize(
    ("change", "reads_first"),
    [
        (alternating(forced(), forced(), rest), False),  # the head lags behind
        (alternating(forced(), *[rest] * 12), True),  # by more than it reads when it drafts
        (forced(prefills_draft=False), True),  # it has read no prompt
    ],
)
def test_a_head_that_lags_reads_what_it_has_missed(built: Built, change: Change, reads_first: bool) -> None:
    engine, checker = checked_as_forced(built, "tree:12", change)
    num_read: list[int] = []
    engine.step_runner.observers.append(lambda record: num_read.append(len(record.plan.draft_prefills)))
    tokens = drive(engine, make_requests(is_greedy=True)).tokens
    engine.close()
    assert any(num_read) == reads_first
    assert checker.num_equal == checker.num_parents > 20 and checker.num_moved > 1
    assert tokens == tokens_of(built, "none", make_requests(is_greedy=True))


def test_prefixes_that_are_reused_are_drafted_behind(built: Built) -> None:
    """A reused row may hold another sequence's next token, so that a few nodes differ; features are never missing."""
    requests = make_requests(12, is_greedy=True, num_shared=20)
    engine, checker = checked(built, "tree:12")
    tokens = drive(engine, requests).tokens
    assert engine.metrics().num_reused_blocks > 0
    engine.close()
    assert 0.8 * checker.num_parents < checker.num_equal and checker.num_moved > 10
    assert tokens == tokens_of(built, "none", requests)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 32}])
def test_tokens_equal_plain_decoding(
    built: Built, plain: dict[str, list[int]], policy: str, options: dict[str, object]
) -> None:
    """Greedy sequences beside sampled ones, all at once and at random times."""
    for seed in (None, 1):
        engine = open_engine(built, policy, **options)
        assert drive(engine, make_requests(), seed=seed).tokens == plain
        assert engine.metrics().num_accepted > 20
        engine.close()


def test_cancelled_requests_give_everything_back(built: Built, plain: dict[str, list[int]]) -> None:
    requests, engine = make_requests(), open_engine(built, "tree:12")
    result = drive(engine, requests, seed=2, cancel={r.request_id: 3 for r in requests[::2]})
    engine.close()
    reasons = [result.final[r.request_id].finish_reason for r in requests]
    assert FinishReason.CANCELLED in reasons and FinishReason.LENGTH in reasons
    for request_id, tokens in result.tokens.items():
        assert tokens == plain[request_id][: len(tokens)]


def test_stop_words_end_a_request_within_a_tree(built: Built, plain: dict[str, list[int]]) -> None:
    requests = [replace(r, stop_sequences=(tuple(plain[r.request_id][6:8]),)) for r in make_requests()]
    engine = open_engine(built, "tree:12")
    result = drive(engine, requests)
    engine.close()
    assert result.tokens == tokens_of(built, "none", requests)
    assert all(len(tokens) <= 8 for tokens in result.tokens.values())
    assert {output.finish_reason for output in result.final.values()} == {FinishReason.STOP_WORDS}


@pytest.mark.parametrize("shift", [0, 1])
def test_clients_chains_go_beside_trees(built: Built, shift: int) -> None:
    """Right and wrong ones, which the head has not run; what it drafts behind them is the reference's."""
    expected = tokens_of(built, "none", make_requests(is_greedy=True))
    requests = make_requests(is_greedy=True)
    for index in range(0, len(requests), 2):
        guess = [(token + shift) % VOCAB_SIZE for token in expected[requests[index].request_id][:6]]
        requests[index] = replace(requests[index], draft_ids=tuple(guess))
    engine, checker = checked(built, "tree:12", enable_prefix_reuse=False)
    result = drive(engine, requests)
    engine.close()
    assert result.tokens == expected
    assert checker.num_equal == checker.num_parents > 50
    stats = result.final[requests[0].request_id].stats
    assert stats is not None and (stats.num_accepted >= 6 or shift)


def test_a_sequence_of_one_token_gets_no_tree(built: Built) -> None:
    engine = open_engine(built, "tree:12")
    first: dict[int, int] = {}  # by number of tokens

    def observe(record: StepRecord) -> None:
        first.update(zip(record.num_tokens.tolist(), record.frontier.num_drafted.tolist(), strict=True))

    engine.step_runner.observers.append(observe)
    requests = [request for request in make_requests() if request.prompt_ids.size == 1]
    drive(engine, requests)
    engine.close()
    assert len(requests) == 1 and first[1] == 0 < first[2]


def test_a_tree_of_one_node_is_a_chain_of_one_token(built: Built) -> None:
    drafted: list[list[tuple[str, int, list[int]]]] = []
    for policy in ("fixed:1", "tree:1"):
        engine, found = open_engine(built, policy), []

        def observe(record: StepRecord, found: list[tuple[str, int, list[int]]] = found) -> None:
            for row, sequence in enumerate(record.plan.decodes):
                tokens = record.frontier.drafted[row, : record.frontier.num_drafted[row]].tolist()
                found.append((sequence.request.request_id, int(record.num_tokens[row]), tokens))

        engine.step_runner.observers.append(observe)
        drive(engine, make_requests())
        engine.close()
        drafted.append(found)
    assert drafted[0] == drafted[1] and any(tokens for *_, tokens in drafted[0])


def test_tokens_equal_plain_decoding_with_a_target_of_integers(built: Built, tmp_path: Path) -> None:
    options = {"runtime": "llvm", "weights": "int8", "kv_block_size": BLOCK_SIZE, "kv_cache_dtype": "fp32"}
    manifest = build_engines(built.source, built.head_dir, tmp_path, **options)
    assert manifest.target.weight_format.formats[0] == "int8"
    engines = [build_engine(tmp_path, EngineConfig(policy=policy)) for policy in ("none", "tree:12")]
    found = [drive(engine, make_requests()).tokens for engine in engines]
    assert found[0] == found[1]
    assert engines[1].metrics().num_accepted > 20
    for engine in engines:
        engine.close()


# -- what a mistake looks like -----------------------------------------------------------------------


def other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes go on from what the head made of each other's parents."""
    monkeypatch.setattr(LlvmHeadRunner, "join_rows", lambda _, pieces: np.concatenate(pieces[::-1]))


def one_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes lie a row behind their place, behind one that nobody has written."""
    monkeypatch.setattr(head, "node_rows", lambda batch, level, _: node_rows(batch, level, batch.num_tokens))


def features_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the accepted path move, and what the head reads beside them does not."""
    move = KvPool.move_kv

    def move_without(pool: KvPool, *cells: np.ndarray) -> None:
        features, pool.features = pool.features, {}
        move(pool, *cells)
        pool.features = features

    monkeypatch.setattr(KvPool, "move_kv", move_without)


@pytest.mark.parametrize("mistake", [other_order, one_further, features_stay])
def test_mistakes_are_noticed(
    built: Built, mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each spoils what the head drafts, and no token."""
    expected = tokens_of(built, "none", make_requests(is_greedy=True))
    mistake(monkeypatch)
    engine, checker = checked(built, "tree:12", enable_prefix_reuse=False)
    assert drive(engine, make_requests(is_greedy=True)).tokens == expected
    engine.close()
    assert checker.num_parents - checker.num_equal > 10
