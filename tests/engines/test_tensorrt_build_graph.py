"""Graphs for TensorRT: RTX's in ONNX Runtime (test_families.py compares logits), the plugin's without attributes."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.decoder import GraphForm, build_segment
from faser_backend.engines.families import read_spec
from faser_backend.engines.graph import WeightStore
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.weights import ModelWeights
from faser_backend.plugins.tensorrt_contract import ATTEND_OP, NAMESPACE
from tests.plugins.test_tensorrt_plugin_network import GEOMETRY
from tests.support.gathered_runner import GatheredRunner
from tests.support.tiny_models import make_rows, reference_logits, reference_model, run_all, write_checkpoint

MAX_ERROR = 1e-4
NUM_BLOCKS = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("block_size", [1, 16, 5])
def test_any_block_size(block_size: int, source: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    sequence = rng.integers(0, 97, 20)
    tables = rng.permutation(NUM_BLOCKS)[:20][None]
    runner = GatheredRunner(source, tmp_path, block_size=block_size)
    found = [run_all(runner, make_rows([sequence], [start], [num], tables)) for start, num in ((0, 13), (13, 7))]
    wanted = reference_logits(reference_model(source), sequence)
    assert np.abs(np.concatenate(found) - wanted).max() <= MAX_ERROR


def test_half_precision_segments_have_logits_and_scores_in_float32(source: Path, tmp_path: Path) -> None:
    runner = GatheredRunner(source, tmp_path, dtype="fp16", exit_layers=(1,))
    types = {tensor.name: tensor.dtype for graph in runner.graphs for tensor in (*graph.inputs, *graph.outputs)}
    assert {types[name] for name in ("hidden", "hidden_out", "k_pool.0", "v_new.2")} == {"float16"}
    assert {types[name] for name in ("logits", "exit_scores")} == {"float32"}


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
    form = GraphForm("tensorrt", dtype, 4, GEOMETRY)
    graph = build_segment(spec, ModelWeights(checkpoint, spec), store, 1, 3, form=form)
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
