"""EAGLE-3 heads: their graphs, packed and paged, against a dense reference in torch; and the target's features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from engines.build import build_engines
from engines.tensorrt_build import TensorRtOptions
from faser_backend.config import EngineConfig
from faser_backend.core.model import FLOAT32_WEIGHTS
from faser_backend.device.llvm_head import LlvmHeadRunner
from faser_backend.device.onnx_runtime import OrtHeadRunner
from faser_backend.manifest import EngineManifest
from faser_backend.runtime_spec import CPU_RUNTIMES
from faser_backend.serving.runtimes import open_runtime
from tests.eagle3_models import FEATURE_LAYERS, HEAD, NUM_TARGET_LAYERS, ReferenceHead, head_tensors, write_head
from tests.segment_sessions import SegmentSessions
from tests.tiny_models import VOCAB_SIZE, make_rows, reference_model, write_checkpoint, write_tokenizer

MAX_ERROR = 1e-4
NUM_BLOCKS = 40
BLOCK_SIZE = 4
CONFIGS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4, "rope_theta": 500000.0},
    "wide_heads": {"head_dim": 16, "num_key_value_heads": 1},
    "whole_vocabulary": {"draft_vocab_size": None},
}


class Built:
    """A target and a head, built together, and the references of both."""

    def __init__(
        self,
        root: Path,
        *,
        runtime: str = "onnxruntime",
        weights: str | None = None,
        exit_layers: tuple[int, ...] = (),
        kv_cache_dtype: str | None = None,
        tensorrt: TensorRtOptions | None = None,
        dtype: str = "fp32",
        **config: Any,
    ) -> None:
        self.source = write_checkpoint(root / "target", num_hidden_layers=NUM_TARGET_LAYERS)
        self.head_dir = write_head(root / "head", **config)
        self.directory = root / "engine"
        self.manifest = build_engines(
            self.source,
            self.head_dir,
            self.directory,
            runtime=runtime,
            weights=weights,
            exit_layers=exit_layers,
            kv_block_size=BLOCK_SIZE,
            kv_cache_dtype=kv_cache_dtype,
            tensorrt=tensorrt,
            dtype=dtype,
        )
        assert EngineManifest.load(self.directory) == self.manifest
        self.target_reference = reference_model(self.source)
        embedding = self.target_reference.get_parameter("model.embed_tokens.weight").detach()
        self.reference = ReferenceHead(self.head_dir, embedding)

    def target(self) -> SegmentSessions:
        return SegmentSessions(self.manifest.target, self.directory, NUM_BLOCKS, BLOCK_SIZE)

    def head(self) -> SegmentSessions:
        assert self.manifest.draft is not None
        return SegmentSessions(self.manifest.draft, self.directory, NUM_BLOCKS, BLOCK_SIZE)

    def features(self, token_ids: np.ndarray) -> torch.Tensor:
        """What the target's reference feeds to the layers in question, side by side: [n, 3 * hidden_size]."""
        with torch.no_grad():
            run = self.target_reference(torch.from_numpy(token_ids)[None], output_hidden_states=True)
        return torch.cat([run.hidden_states[layer][0] for layer in FEATURE_LAYERS], dim=-1)


@pytest.fixture(scope="module", params=CONFIGS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("eagle3"), **CONFIGS[request.param])


def same_logits(found: np.ndarray, wanted: np.ndarray, error: float = MAX_ERROR) -> bool:
    """Within the error, and -inf for the same ids."""
    is_known = np.isfinite(wanted)
    if not np.array_equal(is_known, np.isfinite(found)):
        return False
    return np.abs(found[is_known] - wanted[is_known]).max() <= error


def split_features(features: torch.Tensor) -> dict[str, np.ndarray]:
    parts = features.chunk(3, dim=-1)
    return {f"aux_hidden.{layer}": part.numpy() for layer, part in zip(FEATURE_LAYERS, parts, strict=True)}


def shuffled_tables(rng: np.random.Generator, num_sequences: int, width: int = 10) -> np.ndarray:
    return rng.permutation(NUM_BLOCKS)[: num_sequences * width].reshape(num_sequences, width)


def read_ragged(
    built: Built, head: SegmentSessions, rng: np.random.Generator, tokens: list[np.ndarray], tables: np.ndarray
) -> None:
    """Feeds every sequence's tokens, beside its features, in ragged chunks, and compares the logits of all rows."""
    joined = [built.reference.joined(built.features(t)) for t in tokens]
    shifted = [t[1:] for t in tokens]
    expected = [built.reference.run(s, j[:-1])[0] for s, j in zip(shifted, joined, strict=True)]
    starts = np.zeros(len(tokens), np.int64)
    lengths = np.array([s.size for s in shifted])
    while (starts < lengths).any():
        live = np.flatnonzero(starts < lengths)
        counts = [int(rng.integers(1, min(lengths[i] - starts[i], 7) + 1)) for i in live]
        rows = make_rows([shifted[i] for i in live], list(starts[live]), counts, tables[live])
        parts = [built.features(tokens[i])[starts[i] : starts[i] + n] for i, n in zip(live, counts, strict=True)]
        hidden = head.run(0, None, **split_features(torch.cat(parts)))["hidden_out"]
        logits = head.run(1, rows, hidden=hidden)["logits"]
        wanted = [expected[i][starts[i] : starts[i] + n] for i, n in zip(live, counts, strict=True)]
        assert same_logits(logits, np.concatenate(wanted))
        starts[live] += counts


def test_rows_on_target_features_equal_a_dense_run(built: Built) -> None:
    for seed in range(2):
        rng = np.random.default_rng(seed)
        tokens = [rng.integers(0, VOCAB_SIZE, int(n)) for n in rng.integers(9, 38, 3)]
        read_ragged(built, built.head(), rng, tokens, shuffled_tables(rng, 3))


def test_chains_on_own_hidden_states_equal_a_dense_run(built: Built) -> None:
    """Three sequences of unequal length, then five greedy steps, each on the hidden state of the step before."""
    rng = np.random.default_rng(5)
    tokens = [rng.integers(0, VOCAB_SIZE, n) for n in (11, 6, 19)]
    tables, head = shuffled_tables(rng, 3), built.head()
    last = np.cumsum([t.size - 1 for t in tokens]) - 1
    shifted = [t[1:] for t in tokens]
    rows = make_rows(shifted, [0, 0, 0], [s.size for s in shifted], tables, last)
    features = torch.cat([built.features(t)[:-1] for t in tokens])
    joined = head.run(0, None, **split_features(features))["hidden_out"]
    step = head.run(1, rows, hidden=joined)
    assert step["hidden_out"].shape == (3, HEAD["hidden_size"])
    # of the reference: everything that each sequence's rows have read so far
    read = [(s, built.reference.joined(built.features(t))[:-1]) for s, t in zip(shifted, tokens, strict=True)]
    for _ in range(5):
        runs = [built.reference.run(ids, hidden) for ids, hidden in read]
        assert same_logits(step["logits"], np.stack([logits[-1] for logits, _ in runs]))
        assert np.abs(step["hidden_out"] - torch.stack([h[-1] for _, h in runs]).numpy()).max() <= MAX_ERROR
        drafted = step["logits"].argmax(1)
        read = [
            (np.append(ids, drafted[i]), torch.cat([hidden, runs[i][1][-1:]])) for i, (ids, hidden) in enumerate(read)
        ]
        starts = [ids.size - 1 for ids, _ in read]
        rows = make_rows([ids for ids, _ in read], starts, [1, 1, 1], tables)
        step = head.run(1, rows, hidden=step["hidden_out"])


@pytest.mark.parametrize("exit_layers", [(), (4,), (3, 5)])
def test_the_target_gives_the_inputs_of_three_layers(exit_layers: tuple[int, ...], tmp_path: Path) -> None:
    """Whole and cut, also right before a layer whose input is wanted; and its logits are what they were."""
    built = Built(tmp_path, exit_layers=exit_layers)
    assert built.manifest.target.spec.feature_layers == FEATURE_LAYERS
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, VOCAB_SIZE, n) for n in (13, 7)]
    tables, target = shuffled_tables(rng, 2), built.target()
    found = []
    for starts, counts in (([0, 0], [9, 2]), ([9, 2], [4, 5])):
        rows = make_rows(tokens, starts, counts, tables)
        exits = {"exit_candidates": np.zeros((rows.num_rows, 1), np.int64)}
        outputs: dict[str, np.ndarray] = {}
        for segment in range(len(target.model.segments)):
            outputs |= target.run(segment, rows, **exits, **({"hidden": outputs["hidden_out"]} if segment else {}))
        wanted = torch.cat([built.features(t)[s : s + n] for t, s, n in zip(tokens, starts, counts, strict=True)])
        for name, part in split_features(wanted).items():
            assert np.abs(outputs[name] - part).max() <= MAX_ERROR
        found.append(outputs["logits"])
    with torch.no_grad():
        dense = [built.target_reference(torch.from_numpy(t)[None]).logits[0].numpy() for t in tokens]
    assert np.abs(found[1] - np.concatenate([dense[0][9:], dense[1][2:]])).max() <= MAX_ERROR


def test_each_tensor_of_a_head_shows_in_its_logits(tmp_path: Path) -> None:
    """Negative control: the comparison would notice a tensor that is left out or read from the wrong place."""
    built = Built(tmp_path)
    rng = np.random.default_rng(3)
    tokens, tables = [rng.integers(0, VOCAB_SIZE, 12)], shuffled_tables(rng, 1)
    for name in [name for name in built.reference.tensors if name != "t2d"]:
        kept = built.reference.tensors[name]
        built.reference.tensors[name] = kept.roll(1, 0) if name == "d2t" else kept * 1.1
        with pytest.raises(AssertionError):
            read_ragged(built, built.head(), rng, tokens, tables)
        built.reference.tensors[name] = kept
    read_ragged(built, built.head(), rng, tokens, tables)


def test_a_head_on_stale_features_is_noticed(built: Built) -> None:
    """Negative control: rows that read the feature of their own token's position, not of the one before."""
    rng = np.random.default_rng(6)
    tokens = rng.integers(0, VOCAB_SIZE, 12)
    features = built.features(tokens)
    rows = make_rows([tokens[1:]], [0], [11], shuffled_tables(rng, 1))
    head = built.head()
    hidden = head.run(0, None, **split_features(features[1:]))["hidden_out"]
    wanted, _ = built.reference.run(tokens[1:], built.reference.joined(features[:-1]))
    assert not same_logits(head.run(1, rows, hidden=hidden)["logits"], wanted)


def logits_of_layer(directory: Path, tokens: np.ndarray, hidden: np.ndarray, table: np.ndarray) -> np.ndarray:
    """What the engine's head gives for tokens beside hidden states, on the engine's runtime."""
    manifest = EngineManifest.load(directory)
    runtime = open_runtime(directory, manifest, EngineConfig())
    assert manifest.draft is not None
    pool = runtime.open_pool(manifest.draft, NUM_BLOCKS)
    runner = runtime.open_runner(manifest.draft, runtime.menu.whole, pool)
    assert isinstance(runner, OrtHeadRunner | LlvmHeadRunner)
    logits = runner.run_layer(make_rows([tokens], [0], [tokens.size], table), hidden)[0].copy()
    runner.close()
    return logits


@pytest.mark.parametrize("runtime", CPU_RUNTIMES)
def test_other_published_layouts_give_the_same_head(runtime: str, tmp_path: Path) -> None:
    """The layer under vLLM's name, an embedding of its own, half precision, explicit layers."""
    target = write_checkpoint(tmp_path / "target", num_hidden_layers=NUM_TARGET_LAYERS)
    rng = np.random.default_rng(2)
    own = torch.from_numpy(rng.normal(size=(VOCAB_SIZE, HEAD["hidden_size"])).astype(np.float32))
    tensors = head_tensors(HEAD, prefix="layers.0.") | {"embed_tokens.weight": own}
    tensors = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}
    head = write_head(tmp_path / "head", tensors, eagle_config=layers, architectures=["Eagle3LlamaForCausalLM"])
    manifest = build_engines(target, head, tmp_path / "engine", runtime=runtime, kv_block_size=BLOCK_SIZE)
    assert manifest.target.spec.feature_layers == (1, 4, 7)
    assert manifest.draft is not None
    assert manifest.draft.spec.checkpoint_dtype == "BF16"
    assert manifest.draft.weight_format.name == ("bf16" if runtime == "llvm" else FLOAT32_WEIGHTS.name)
    reference = ReferenceHead(head, own, prefix="layers.0.")
    reference.tensors = {n: t.float() if t.is_floating_point() else t for n, t in reference.tensors.items()}
    reference.embedding = reference.tensors["embed_tokens.weight"]
    tokens, hidden = rng.integers(0, VOCAB_SIZE, 9), rng.normal(size=(9, HEAD["hidden_size"])).astype(np.float32)
    found = logits_of_layer(tmp_path / "engine", tokens, hidden, shuffled_tables(rng, 1))
    assert same_logits(found, reference.run(tokens, torch.from_numpy(hidden))[0])


def test_a_shared_embedding_is_read_from_the_target_s_file(built: Built) -> None:
    assert built.manifest.draft is not None
    model = onnx.load(built.directory / built.manifest.draft.segments[1].file.name, load_external_data=False)
    files = {tensor.name: tensor.external_data[0].value for tensor in model.graph.initializer if tensor.external_data}
    assert files.pop("embedding") == "target.weights"
    assert set(files.values()) == {"draft.weights"}


@pytest.mark.parametrize("runtime", CPU_RUNTIMES)
def test_rows_that_pad_a_vocabulary_are_cut_from_heads_too(runtime: str, tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", num_hidden_layers=NUM_TARGET_LAYERS, vocab_size=104)
    write_tokenizer(target, VOCAB_SIZE)
    head = write_head(tmp_path / "head", vocab_size=104)
    manifest = build_engines(target, head, tmp_path / "engine", runtime=runtime, kv_block_size=BLOCK_SIZE)
    assert manifest.draft is not None
    assert (manifest.draft.spec.vocab_size, manifest.draft.spec.padded_vocab_size) == (VOCAB_SIZE, 104)
    reference = ReferenceHead(head, reference_model(target).get_parameter("model.embed_tokens.weight").detach())
    rng = np.random.default_rng(4)
    tokens, hidden = rng.integers(0, VOCAB_SIZE, 9), rng.normal(size=(9, HEAD["hidden_size"])).astype(np.float32)
    wanted, _ = reference.run(tokens, torch.from_numpy(hidden))
    assert np.isfinite(wanted[:, VOCAB_SIZE:]).any(), "the head must know an id that is cut"
    found = logits_of_layer(tmp_path / "engine", tokens, hidden, shuffled_tables(rng, 1))
    assert same_logits(found, wanted[:, :VOCAB_SIZE])
