"""EAGLE-3 heads for TensorRT: engines by the real compiler, and the plugin's graph against a dense reference."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from faser_backend.core.model import EAGLE3
from faser_backend.engines.build import build_engines
from faser_backend.engines.decoder import GraphForm, build_head
from faser_backend.engines.eagle3 import read_head
from faser_backend.engines.families import read_spec
from faser_backend.engines.graph import WeightStore
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.safetensors_checkpoint import HuggingFaceCheckpoint
from faser_backend.engines.tensorrt_buckets import CallLimits, SplitStreams, TensorRtOptions
from faser_backend.engines.tensorrt_build import TensorRtCompiler
from faser_backend.engines.weights import ModelWeights
from faser_backend.files import read_json
from faser_backend.manifest import EngineManifest, FileSpec, ModelEngine, SegmentSpec, TensorSpec
from faser_backend.plugins.tensorrt_contract import NAMESPACE
from tests.engines.test_eagle3 import same_logits
from tests.plugins.test_tensorrt_plugin_network import BLOCK_SIZE, GEOMETRY, NUM_BLOCKS, AttendSplits, CombineSplits
from tests.support import eagle3_models
from tests.support.eagle3_models import HEAD, ReferenceHead
from tests.support.tiny_models import VOCAB_SIZE, reference_model, write_checkpoint

FEATURES = (1, 2, 3)
WIDTH = HEAD["hidden_size"]
LIMITS = CallLimits(max_num_seqs=4, max_context=64, max_prefill_tokens=32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def head_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in FEATURES]}
    return eagle3_models.write_head(tmp_path_factory.mktemp("head"), eagle_config=layers)


def test_the_real_compiler_takes_a_head_and_its_target(source: Path, head_dir: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    manifest = build_engines(
        source,
        head_dir,
        tmp_path / "engine",
        runtime="tensorrt_rtx",
        dtype="bf16",
        exit_layers=(2,),
        kv_block_size=BLOCK_SIZE,
        tensorrt=TensorRtOptions(LIMITS),
        progress=lambda *call: calls.append(call),
    )
    assert EngineManifest.load(tmp_path / "engine") == manifest
    names = {path.name for path in (tmp_path / "engine").iterdir()}
    assert names == {file.name for file in manifest.files} | {"manifest.json"}
    assert manifest.draft is not None
    assert manifest.draft.spec.max_context == manifest.target.spec.max_context == 64

    tensor_dtype = "bfloat16"
    of_segments = [tensors_of(segment.outputs) for segment in manifest.target.segments]
    assert [[name for name in tensors if name.startswith("aux_hidden")] for tensors in of_segments] == [
        ["aux_hidden.1"],
        ["aux_hidden.2", "aux_hidden.3"],
    ]
    feature = TensorSpec("aux_hidden.2", tensor_dtype, ("T", WIDTH))
    assert of_segments[1]["aux_hidden.2"] == feature
    join, layer = manifest.draft.segments
    assert [segment.file.name for segment in (join, layer)] == ["draft.0.engine", "draft.1.engine"]
    assert tensors_of(join.inputs)["aux_hidden.2"] == feature and len(join.inputs) == len(FEATURES)
    assert join.outputs == (TensorSpec("hidden_out", tensor_dtype, ("T", WIDTH)),)
    inputs, outputs = tensors_of(layer.inputs), tensors_of(layer.outputs)
    assert {"token_ids", "logit_rows", "k_pool.0", "v_pool.0"} < set(inputs)
    assert inputs["hidden"] == TensorSpec("hidden", tensor_dtype, ("T", WIDTH))
    assert outputs["hidden_out"] == TensorSpec("hidden_out", tensor_dtype, ("R", WIDTH))
    assert outputs["logits"] == TensorSpec("logits", "float32", ("R", VOCAB_SIZE))
    assert set(outputs) == {"logits", "hidden_out", "k_new.0", "v_new.0"}
    assert [bucket.ranges["T"][2] for bucket in join.buckets] == [bucket.ranges["T"][2] for bucket in layer.buckets]

    done = [call[1] for call in calls]
    assert done == sorted(done) and set(done) == set(range(calls[-1][2] + 1)) and calls[-1][0] == "done"
    said = [what for what, *_ in calls]
    assert "draft.0: compile the join of hidden states" in said
    assert {"draft: EAGLE-3 head", "draft.1: compile layers 0 to 1"} <= set(said)


def tensors_of(tensors: tuple[TensorSpec, ...]) -> dict[str, TensorSpec]:
    return {tensor.name: tensor for tensor in tensors}


def test_a_head_and_its_target_have_no_profiles_of_splits(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head and target run serially on the whole device; a pair of models has profiles of every split."""
    monkeypatch.setattr(TensorRtCompiler, "compile_segment", lambda self, onnx, segment, buckets, path: path.touch())
    compiler = TensorRtCompiler("tensorrt_rtx", "fp16", TensorRtOptions(), BLOCK_SIZE, print)
    compiler.options = TensorRtOptions(LIMITS, split_streams={"16/116": SplitStreams(draft=1, target=2)})
    spec = replace(read_spec(open_checkpoint(source).fields), max_context=64)
    segment = SegmentSpec(FileSpec("target.0.onnx", "", 0), 0, 4, (TensorSpec("token_ids", "int64", ("T",)),), ())
    head, target = replace(spec, family=EAGLE3), replace(spec, feature_layers=FEATURES)
    for each, splits in ((spec, {"", "16/116"}), (head, {""}), (target, {""})):
        model = compiler.compile_model(ModelEngine(each, None, (segment,)), tmp_path, tmp_path)
        assert {bucket.split for bucket in model.segments[0].buckets} == splits


# -- full TensorRT, whose compiler is not here ---------------------------------------------------------


class PluginHead:
    """The head's two graphs for full TensorRT, in ONNX's reference evaluator."""

    def __init__(self, source: Path, head_dir: Path, directory: Path) -> None:
        target = open_checkpoint(source)
        checkpoint = HuggingFaceCheckpoint(head_dir, read_json(head_dir / "config.json"))
        spec = read_spec(target.fields)
        head = read_head(checkpoint, spec)
        own = ModelWeights(checkpoint, head.spec, sources=head.sources, others=("d2t", "t2d"))
        store = WeightStore(directory / "draft.weights")
        store.add("embedding", ModelWeights(target, spec)["embedding"])
        form = GraphForm("tensorrt", "fp32", BLOCK_SIZE, GEOMETRY)
        graphs = build_head(head, spec.hidden_size, own, store, form)
        store.close()
        ops = [AttendSplits, CombineSplits]
        self.op_types: list[str] = []
        self._runs: list[ReferenceEvaluator] = []
        for index, graph in enumerate(graphs):
            self.op_types += [node.op_type for node in graph.model.graph.node if node.domain == NAMESPACE]
            path = directory / f"{index}.plugins.onnx"
            path.write_bytes(graph.model.SerializeToString())
            self._runs.append(ReferenceEvaluator(str(path), new_ops=ops))
        shape = (HEAD["num_key_value_heads"], NUM_BLOCKS, BLOCK_SIZE, HEAD["head_dim"])
        # Masked values are multiplied by 0, so they must be finite.
        self._pools = {f"{name}_pool.0": np.full(shape, 9.0, np.float32) for name in "kv"}

    def join(self, features: torch.Tensor) -> np.ndarray:
        parts = features.numpy().reshape(features.shape[0], len(FEATURES), -1).swapaxes(0, 1)
        given = {f"aux_hidden.{layer}": part for layer, part in zip(FEATURES, parts, strict=True)}
        (joined,) = self._runs[0].run(["hidden_out"], given)
        return np.asarray(joined)

    def run(self, tokens: np.ndarray, hidden: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Runs rows of one sequence at positions from `first` on, its blocks in descending order -> logits, hidden."""
        num_rows = tokens.size
        table = np.arange(NUM_BLOCKS, dtype=np.int32)[::-1].copy()
        positions = first + np.arange(num_rows)
        feeds = {
            "token_ids": tokens,
            "hidden": hidden,
            "positions": positions,
            "slot_mapping": table[positions // BLOCK_SIZE] * BLOCK_SIZE + (positions % BLOCK_SIZE).astype(np.int32),
            "cu_rows": np.array([0, num_rows], np.int32),
            "context_lens": np.array([first], np.int32),
            "block_table": table[None],
            "logit_rows": np.arange(num_rows),
            **self._pools,
        }
        logits, made = self._runs[1].run(["logits", "hidden_out"], feeds)
        return np.asarray(logits), np.asarray(made)


@pytest.fixture(scope="module")
def reference(source: Path, head_dir: Path) -> ReferenceHead:
    embedding = reference_model(source).get_parameter("model.embed_tokens.weight").detach()
    return ReferenceHead(head_dir, embedding)


def test_the_plugins_graph_of_a_head_gives_a_dense_runs_logits(
    source: Path, head_dir: Path, reference: ReferenceHead, tmp_path: Path
) -> None:
    """The head runs a prompt in two chunks on the target's hidden states, then two tokens on its own."""
    head = PluginHead(source, head_dir, tmp_path)
    assert head.op_types == ["AttendSplits", "CombineSplits"]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB_SIZE, 11)
    features = torch.from_numpy(rng.normal(size=(9, 3 * WIDTH)).astype(np.float32))
    hidden = reference.joined(features)
    for row in (9, 10):
        hidden = torch.cat([hidden, reference.run(tokens[:row], hidden)[1][-1:]])
    wanted, states = reference.run(tokens, hidden)
    beside = head.join(features)
    for first, last in ((0, 6), (6, 9), (9, 10), (10, 11)):
        logits, made = head.run(tokens[first:last], beside[: last - first], first)
        assert same_logits(logits, wanted[first:last])
        assert np.abs(made - states[first:last].numpy()).max() <= 1e-4
        beside = beside[last - first :] if last < 9 else made[-1:]
