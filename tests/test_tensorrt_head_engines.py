"""EAGLE-3 heads behind TensorRT's runner: features, logits, chains and trees against a dense reference, tokens of plain
decoding. Engines are the graphs that TensorRT-RTX gets, run by ONNX Runtime (tests.ort_engines)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.tensorrt_build import TensorRtOptions
from faser_backend.config import EngineConfig
from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.device.cuda.pool import CudaKvPool
from faser_backend.device.runtime import ModelPair
from faser_backend.pipeline.head import HeadTreeCalls
from faser_backend.policy.registry import parse_policy
from faser_backend.serving.compose import assemble_on
from faser_backend.serving.runtimes import open_runtime
from tests.forcing import Forced, at_random, forced
from tests.harness import drive, guessed
from tests.head_trees import Agreeing, TreeChecker
from tests.ort_engines import graphs_are_engines
from tests.test_eagle3 import NUM_BLOCKS, Built, same_logits, shuffled_tables
from tests.test_eagle3_drafting import ChainChecker, make_requests, open_engine, tokens_of
from tests.tiny_models import VOCAB_SIZE, make_rows, reference_logits, run_all

RUNTIME, BLOCK_SIZE = "tensorrt_rtx", 4
TREES = TensorRtOptions(has_trees=True)


@pytest.fixture(scope="module", autouse=True)
def _graphs_are_engines() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        graphs_are_engines(patch)
        patch.setattr(HeadTreeCalls, "difference", 0.7)  # the tests' head is surer than a trained one
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("chains"), runtime=RUNTIME, exit_layers=(4,))


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Agreeing(tmp_path_factory.mktemp("trees"), runtime=RUNTIME, tensorrt=TREES)


@pytest.fixture(scope="module")
def plain(built: Built) -> dict[str, list[int]]:
    return tokens_of(built, "none", make_requests(is_greedy=True))


@pytest.fixture(scope="module")
def plain_of_trees(agreeing: Built) -> dict[str, list[int]]:
    return tokens_of(agreeing, "none", make_requests(is_greedy=True))


class Runners:
    """Target and head of an engine directory, and the hidden states that they share."""

    def __init__(self, built: Built) -> None:
        manifest = built.manifest
        assert manifest.draft is not None
        runtime = open_runtime(built.directory, manifest, EngineConfig())
        models = (manifest.target, manifest.draft)
        self.pool, own = (runtime.open_pool(model, NUM_BLOCKS) for model in models)
        own.features = self.pool.features
        pools = (self.pool, own)
        self.target, self.head = (
            runtime.open_runner(model, runtime.menu.whole, pool) for model, pool in zip(models, pools, strict=True)
        )

    def read(
        self, tokens: list[np.ndarray], starts: list[int], counts: list[int], tables: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The target reads these rows, then the head the next tokens beside them. Returns the logits of both."""
        of_target = run_all(self.target, make_rows(tokens, starts, counts, tables))
        return of_target, run_all(self.head, make_rows([t[1:] for t in tokens], starts, counts, tables))

    def features_of(self, num_tokens: int, table: np.ndarray) -> np.ndarray:
        """[num_tokens, 3 * hidden_size] of the sequence that the table is of."""
        blocks, offsets = np.divmod(np.arange(num_tokens), BLOCK_SIZE)
        return self.pool.features[table[blocks], offsets].flatten(1).float().numpy()


@pytest.mark.parametrize("has_trees", [False, True])
def test_rows_on_the_target_s_features_equal_a_dense_run(has_trees: bool, built: Built, tmp_path: Path) -> None:
    """Ragged chunks of three sequences; the target is cut before a layer whose input is wanted. has_trees: chains in
    engines with a mask."""
    if has_trees:
        built = Built(tmp_path, runtime=RUNTIME, exit_layers=(4,), tensorrt=TREES, num_key_value_heads=4)
    rng, runners = np.random.default_rng(0), Runners(built)
    tokens = [rng.integers(0, VOCAB_SIZE, int(n)) for n in rng.integers(9, 38, 3)]
    tables = shuffled_tables(rng, 3)
    joined = [built.reference.joined(built.features(t)) for t in tokens]
    expected = [built.reference.run(t[1:], j[:-1])[0] for t, j in zip(tokens, joined, strict=True)]
    of_target = [reference_logits(built.target_reference, t) for t in tokens]
    starts, lengths = np.zeros(3, np.int64), np.array([t.size - 1 for t in tokens])
    while (starts < lengths).any():
        live = np.flatnonzero(starts < lengths)
        counts = [int(rng.integers(1, min(lengths[i] - starts[i], 7) + 1)) for i in live]
        both = runners.read([tokens[i] for i in live], starts[live].tolist(), counts, tables[live])
        for logits, dense in zip(both, (of_target, expected), strict=True):
            wanted = [dense[i][starts[i] : starts[i] + n] for i, n in zip(live, counts, strict=True)]
            assert same_logits(logits, np.concatenate(wanted))
        starts[live] += counts
    for t, table in zip(tokens, tables, strict=True):
        found = runners.features_of(t.size - 1, table)
        assert np.abs(found - built.features(t)[:-1].numpy()).max() <= 1e-4


def test_half_precision_heads_run(tmp_path: Path) -> None:
    half = Built(tmp_path, runtime=RUNTIME, dtype="fp16")
    runners, tokens = Runners(half), np.random.default_rng(4).integers(0, VOCAB_SIZE, 12)
    _, logits = runners.read([tokens], [0], [11], np.arange(4)[None])
    wanted = half.reference.run(tokens[1:], half.reference.joined(half.features(tokens))[:-1])[0]
    is_known = np.isfinite(wanted)
    assert runners.pool.features.dtype == torch.float16
    assert np.array_equal(is_known, np.isfinite(logits))
    assert 1e-4 < np.abs(logits[is_known] - wanted[is_known]).max() < 0.1


def test_chains_are_the_reference_s_and_tokens_plain_decoding_s(built: Built, plain: dict[str, list[int]]) -> None:
    """In one full context, so that sequences are preempted."""
    engine, checker = open_engine(built, "fixed:4", enable_prefix_reuse=False, num_kv_blocks=32), ChainChecker(built)
    engine.stepper.observers.append(checker.observe)
    tokens = drive(engine, make_requests(is_greedy=True)).tokens
    assert engine.metrics().num_preemptions > 0
    engine.close()
    assert checker.num_equal == checker.num_chains > 20
    assert tokens == plain


def test_calls_too_large_for_graphs_are_no_different(
    built: Built, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a context, and have hidden states of their own."""
    for module in ("tensorrt_segment", "runner"):
        monkeypatch.setattr(f"faser_backend.device.cuda.{module}.MAX_GRAPH_ROWS", 4)
    engine, checker = open_engine(built, "fixed:4", enable_prefix_reuse=False), ChainChecker(built)
    engine.stepper.observers.append(checker.observe)
    assert drive(engine, make_requests(is_greedy=True)).tokens == plain
    engine.close()
    assert checker.num_equal == checker.num_chains > 20


def test_sampled_tokens_are_those_of_plain_decoding(built: Built) -> None:
    requests = make_requests()
    assert tokens_of(built, "fixed:3", requests) == tokens_of(built, "none", requests)


def test_rows_that_leave_at_an_exit_leave_no_hole(built: Built, plain: dict[str, list[int]]) -> None:
    pruner = at_random(np.random.default_rng(0), exits=(0,), share=0.5)
    policy = Forced(parse_policy("fixed:5", guessed), forced(pruner=pruner))
    models = ModelPair(built.manifest.target, built.manifest.draft)
    config = EngineConfig(max_num_seqs=4, max_prefill_tokens=16, enable_prefix_reuse=False)
    engine = assemble_on(open_runtime(built.directory, built.manifest, config), models, policy, config)
    checker = ChainChecker(built)
    engine.stepper.observers.append(checker.observe)
    tokens = drive(engine, make_requests(is_greedy=True)).tokens
    assert engine.metrics().num_pruned > 0
    engine.close()
    assert checker.num_equal == checker.num_chains > 20
    assert tokens == plain


@pytest.mark.parametrize("policy", ["tree:5", "tree:15"])
def test_trees_are_the_reference_s_and_tokens_plain_decoding_s(
    agreeing: Built, plain_of_trees: dict[str, list[int]], policy: str
) -> None:
    engine = open_engine(agreeing, policy, enable_prefix_reuse=False)
    checker = TreeChecker(agreeing, engine)
    tokens = drive(engine, make_requests(is_greedy=True)).tokens
    num_accepted = engine.metrics().num_accepted
    engine.close()
    assert checker.num_equal == checker.num_parents > 50
    assert num_accepted > 30
    assert min(checker.num_siblings, checker.num_deep) > 30 and checker.num_moved > 10
    assert tokens == plain_of_trees


# -- what has to fail ----------------------------------------------------------------------------------


def test_features_of_other_positions_are_noticed(built: Built) -> None:
    """A head that reads what lies one place further on drafts other chains."""
    engine, checker = open_engine(built, "fixed:3", enable_prefix_reuse=False), ChainChecker(built)
    head: Any = engine.stepper.partitions[WHOLE].draft
    run, features = head.run_segment, head.pool.features

    def run_on_others(segment: int, rows: RowBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        kept = features.clone()
        features.copy_(kept.roll(1, 1))
        found = run(segment, rows, hidden)
        features.copy_(kept)
        return found

    head.run_segment = run_on_others
    engine.stepper.observers.append(checker.observe)
    drive(engine, make_requests(is_greedy=True))
    engine.close()
    assert checker.num_equal < 0.5 * checker.num_chains


def test_hidden_states_that_stay_where_they_were_computed_are_noticed(
    agreeing: Built, plain_of_trees: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values move all the same, so tokens stay right."""
    move = CudaKvPool.move

    def move_keys_alone(pool: CudaKvPool, sources: torch.Tensor, targets: torch.Tensor) -> None:
        kept = pool.features.clone()
        move(pool, sources, targets)
        pool.features.copy_(kept)

    monkeypatch.setattr(CudaKvPool, "move", move_keys_alone)
    engine = open_engine(agreeing, "tree:5", enable_prefix_reuse=False)
    checker = TreeChecker(agreeing, engine)
    tokens = drive(engine, make_requests(is_greedy=True)).tokens
    engine.close()
    assert checker.num_equal < checker.num_parents
    assert tokens == plain_of_trees


def test_an_engine_never_writes_what_it_is_reading(
    built: Built, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The layer's hidden states go where its next call reads them: by a copy, else the contexts here object."""
    monkeypatch.setattr("faser_backend.device.cuda.tensorrt_segment._apart", lambda *_: {})
    engine = open_engine(built, "fixed:3")
    drive(engine, make_requests(2, is_greedy=True))
    engine.close()
    assert "hidden_out is written where ['hidden'] are read" in caplog.text


def test_trees_need_engines_that_were_built_for_them(built: Built, agreeing: Built) -> None:
    with pytest.raises(ConfigError, match=r"this engine of 'tensorrt_rtx' verifies chains; use .* build with --trees"):
        open_engine(built, "tree:4")
    with pytest.raises(ConfigError, match="policy = 'tree:16': the engine verifies at most 16 rows of a sequence"):
        open_engine(agreeing, "tree:16")
