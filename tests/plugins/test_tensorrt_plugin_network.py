"""The graph for full TensorRT: the plugins' attributes, and equal results.

ONNX's reference evaluator runs it with fake ops; a dense run of the model is the reference. TensorRT-RTX's parser is
that of full TensorRT up to the plugin's creation.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from faser_backend.engines.decoder import GraphForm, build_segment
from faser_backend.engines.families import read_spec
from faser_backend.engines.graph import WeightStore
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.tensorrt_build import plugin_geometry
from faser_backend.engines.weights import ModelWeights
from faser_backend.plugins import reference
from faser_backend.plugins.tensorrt_contract import ATTEND_OP, COMBINE_OP, EXTRA_PART_ROWS, NAMESPACE, Geometry
from tests.support.tiny_models import reference_logits, reference_model, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE, NUM_BLOCKS = 4, 12
GEOMETRY = Geometry(
    num_heads=4, num_kv_heads=2, head_dim=8, kv_block_size=BLOCK_SIZE, tile_rows=8, num_sms=132, capability=90
)


def attended(*tensors: np.ndarray) -> np.ndarray:
    """Computes the op's reference; writes the pools in place, as the kernel does."""
    out = torch.zeros(tensors[0].shape)
    reference.pruned_chunk_attention(*map(torch.from_numpy, tensors), out)
    return out.numpy()


class AttendSplits(OpRun):
    """A fake op that puts the whole result into the first part."""

    op_domain = NAMESPACE

    def _run(self, *tensors, **attributes):
        check_attributes(attributes)
        num_rows, num_heads, head_dim = tensors[0].shape
        mixed = np.zeros((num_rows + EXTRA_PART_ROWS, num_heads, head_dim), np.float32)
        mixed[:num_rows] = attended(*tensors)
        return mixed, mixed[..., :2].copy(), tensors[3], tensors[4]


class CombineSplits(OpRun):
    op_domain = NAMESPACE

    def _run(self, mixed_parts, stat_parts, q, block_table, cu_rows, **attributes):
        check_attributes(attributes)
        assert block_table.ndim == 2 and cu_rows.shape[0] == block_table.shape[0] + 1
        return (mixed_parts[: q.shape[0]],)


def check_attributes(attributes: dict) -> None:
    assert {name: attributes[name] for name in asdict(GEOMETRY)} == asdict(GEOMETRY)
    assert (attributes["plugin_namespace"], attributes["plugin_version"]) == (NAMESPACE, "1")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def model(source: Path) -> onnx.ModelProto:
    checkpoint = open_checkpoint(source)
    spec = read_spec(checkpoint.fields)
    store = WeightStore(source / "weights")
    form = GraphForm("tensorrt", "fp32", BLOCK_SIZE, GEOMETRY)
    graph = build_segment(spec, ModelWeights(checkpoint, spec), store, 0, 3, form=form)
    store.close()
    return graph.model


def test_every_layer_has_a_node_of_each_plugin(model: onnx.ModelProto) -> None:
    ops = [node.op_type for node in model.graph.node if node.domain == NAMESPACE]
    assert ops == [ATTEND_OP, COMBINE_OP] * 3
    assert [op.domain for op in model.opset_import] == ["", NAMESPACE]


def test_the_geometry_is_that_of_the_model_and_the_gpu(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(open_checkpoint(source).fields)
    gpu = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert plugin_geometry(spec, BLOCK_SIZE) == GEOMETRY


def test_tensorrts_own_parser_makes_the_plugin_of_a_node(model: onnx.ModelProto, source: Path) -> None:
    """The parser finds the op by name and namespace, and passes the node's attributes as fields."""
    path = source / "parsed.onnx"
    path.write_bytes(model.SerializeToString())
    command = [sys.executable, "-m", "tests.support.parse_plugin_network", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip(), done.stderr
    made = json.loads(done.stdout)
    assert made == asdict(GEOMETRY)


def test_the_graph_gives_a_dense_runs_logits(model: onnx.ModelProto, source: Path) -> None:
    path = source / "plugins.onnx"
    path.write_bytes(model.SerializeToString())
    evaluator = ReferenceEvaluator(str(path), new_ops=[AttendSplits, CombineSplits])
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 97, 11)
    table = rng.permutation(NUM_BLOCKS)[:3].astype(np.int32)
    wanted = reference_logits(reference_model(source), tokens)
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, 8)
    pools = {f"{name}_pool.{layer}": np.full(shape, np.nan, np.float32) for layer in range(3) for name in "kv"}
    for first, last in ((0, 7), (7, 11)):
        positions = np.arange(first, last)
        logits = evaluator.run(
            ["logits"],
            {
                "token_ids": tokens[first:last],
                "positions": positions,
                "slot_mapping": table[positions // BLOCK_SIZE] * BLOCK_SIZE + (positions % BLOCK_SIZE).astype(np.int32),
                "cu_rows": np.array([0, last - first], np.int32),
                "context_lens": np.array([first], np.int32),
                "block_table": table[None],
                "logit_rows": np.arange(last - first),
                **pools,
            },
        )[0]
        assert np.abs(logits - wanted[first:last]).max() <= 2e-4
