"""Graphs for TensorRT: RTX's has a dense run's logits in ONNX Runtime, the plugin's has nodes without attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.decoder import build_segment
from faser_backend.engines.families import read_spec
from faser_backend.engines.graph import WeightStore
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.weights import ModelWeights
from faser_backend.plugins.tensorrt_contract import ATTEND_OP, NAMESPACE
from tests.plugins.test_tensorrt_plugin_network import GEOMETRY
from tests.support.gathered_runner import GatheredRunner, Padding
from tests.support.tiny_models import (
    largest_error,
    make_rows,
    reference_logits,
    reference_model,
    run_all,
    write_checkpoint,
)

MAX_ERROR = 1e-4
NUM_BLOCKS = 40
PADDINGS = [Padding(), Padding(rows=3, sequences=2, rows_per_sequence=4, blocks=3)]
CONFIGS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "one_layer": {"num_hidden_layers": 1},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"))


def tables_of(rng: np.random.Generator, num_sequences: int, width: int) -> np.ndarray:
    return rng.permutation(NUM_BLOCKS)[: num_sequences * width].reshape(num_sequences, width)


@pytest.mark.parametrize("padding", PADDINGS, ids=["exact", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gathered_attention_gives_a_dense_runs_logits(name: str, padding: Padding, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "source", **CONFIGS[name])
    runner = GatheredRunner(checkpoint, tmp_path, padding=padding)
    assert largest_error(runner, reference_model(checkpoint), 1, NUM_BLOCKS) <= MAX_ERROR


@pytest.mark.parametrize("exit_layers", [(1,), (1, 2)])
def test_cut_segments_give_the_same_logits(exit_layers: tuple[int, ...], source: Path, tmp_path: Path) -> None:
    runner = GatheredRunner(source, tmp_path, exit_layers=exit_layers, padding=PADDINGS[1])
    assert largest_error(runner, reference_model(source), 2, NUM_BLOCKS) <= MAX_ERROR


@pytest.mark.parametrize("block_size", [1, 16, 5])
def test_any_block_size(block_size: int, source: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    sequence = rng.integers(0, 97, 20)
    tables = rng.permutation(NUM_BLOCKS)[:20][None]
    runner = GatheredRunner(source, tmp_path, block_size=block_size)
    found = [run_all(runner, make_rows([sequence], [start], [num], tables)) for start, num in ((0, 13), (13, 7))]
    wanted = reference_logits(reference_model(source), sequence)
    assert np.abs(np.concatenate(found) - wanted).max() <= MAX_ERROR


def test_rows_pruned_between_segments_do_not_touch_the_kept_ones(source: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    sequences = [rng.integers(0, 97, 14) for _ in range(2)]
    tables = tables_of(rng, 2, 4)
    runner = GatheredRunner(source, tmp_path, exit_layers=(1,))
    run_all(runner, make_rows(sequences, [0, 0], [8, 8], tables))
    hidden = runner.run_segment(0, make_rows(sequences, [8, 8], [5, 5], tables), None)
    kept = np.array([0, 1, 5, 6, 7, 8])  # 2 of 5 rows, 4 of 5 rows
    logits = runner.run_segment(1, make_rows(sequences, [8, 8], [2, 4], tables), hidden[kept])
    reference = reference_model(source)
    expected = [reference_logits(reference, tokens) for tokens in sequences]
    assert np.abs(logits - np.concatenate([expected[0][8:10], expected[1][8:12]])).max() <= MAX_ERROR


def test_exit_scores_are_rows_of_the_head(source: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    rows = make_rows([rng.integers(0, 97, 9)], [0], [9], tables_of(rng, 1, 3))
    candidates = rng.integers(0, 97, (9, 6))
    runner, reference = GatheredRunner(source, tmp_path, exit_layers=(1,)), reference_model(source)
    hidden, scores = runner.run_segment_with_scores(0, rows, None, candidates)
    with torch.no_grad():
        logits = reference.lm_head(reference.model.norm(torch.from_numpy(hidden))).numpy()
    assert scores is not None
    assert np.abs(scores - np.take_along_axis(logits, candidates, 1)).max() <= MAX_ERROR


def test_a_wrong_context_changes_the_logits(source: Path, tmp_path: Path) -> None:
    """Negative control: the comparison notices a sequence that reads another's blocks."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 97, 12) for _ in range(2)]
    tables = tables_of(rng, 2, 3)
    runner = GatheredRunner(source, tmp_path)
    run_all(runner, make_rows(sequences, [0, 0], [11, 11], tables))
    swapped = run_all(runner, make_rows(sequences, [11, 11], [1, 1], tables[::-1].copy()))
    reference = reference_model(source)
    wanted = np.stack([reference_logits(reference, tokens)[-1] for tokens in sequences])
    assert np.abs(swapped - wanted).max() > 100 * MAX_ERROR


def test_half_precision_segments_run_and_stay_close(source: Path, tmp_path: Path) -> None:
    """ONNX Runtime runs fp16 too. Random weights of scale 0.25 make logits of some tens."""
    runner = GatheredRunner(source, tmp_path, dtype="fp16", exit_layers=(1,))
    types = {tensor.name: tensor.dtype for graph in runner.graphs for tensor in (*graph.inputs, *graph.outputs)}
    assert {types[name] for name in ("hidden", "hidden_out", "k_pool.0", "v_new.2")} == {"float16"}
    assert {types[name] for name in ("logits", "exit_scores")} == {"float32"}
    error = largest_error(runner, reference_model(source), 1, NUM_BLOCKS)
    assert MAX_ERROR < error <= 0.5


def test_a_weight_that_the_dtype_cannot_hold_is_refused(source: Path, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")
    store.add("small", np.array([6e4, -1.0], np.float32), "float16")
    with pytest.raises(CheckpointError, match=r"layers\.0\.up: its largest .* = 70000: float16 holds at most 65504"):
        store.add("layers.0.up", np.array([1.0, -7e4], np.float32), "float16")
    store.add("layers.0.up", np.array([1.0, -7e4], np.float32), "bfloat16")
    store.close()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_layer_of_the_plugin_body_reads_and_writes_its_pools(dtype: str, source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    spec = read_spec(checkpoint.fields)
    store = WeightStore(tmp_path / "weights")
    form = {"kv_block_size": 4, "runtime": "tensorrt", "dtype": dtype, "geometry": GEOMETRY}
    graph = build_segment(spec, ModelWeights(checkpoint, spec), store, 1, 3, **form)
    store.close()
    model = graph.model
    path = tmp_path / "segment.onnx"
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(path)
    assert not model.functions
    nodes = [node for node in model.graph.node if node.op_type == ATTEND_OP]
    assert len(nodes) == 2 and {node.domain for node in nodes} == {NAMESPACE}
    assert list(nodes[0].input[3:]) == [
        "k_pool.1",
        "v_pool.1",
        "block_table",
        "cu_rows",
        "context_lens",
        "slot_mapping",
    ]
    assert list(nodes[0].output[2:]) == ["k_pool_out.1", "v_pool_out.1"]
    integers = {tensor.name: tensor.dtype for tensor in graph.inputs if tensor.dtype.startswith("int")}
    assert integers == {
        "positions": "int64",
        "logit_rows": "int64",
        **dict.fromkeys(["slot_mapping", "cu_rows", "context_lens", "block_table"], "int32"),
    }
