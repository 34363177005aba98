"""EAGLE-3 heads whose layer is the project's kernel, against a dense reference, in any batch and format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from faser_backend.core.model import FLOAT32_WEIGHTS
from faser_backend.core.ports import ModelRunner
from faser_backend.cpu.draft_runners import LlvmHeadRunner
from faser_backend.cpu.kernels.matrix_units import has_matrix_units
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.runner import LlvmRunner
from faser_backend.device.partition import CorePartition
from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.rows import single_rows
from tests.support.cpu_products import UNIT_ERROR
from tests.support.eagle3_models import (
    FEATURE_LAYERS,
    HEAD,
    NUM_TARGET_LAYERS,
    PADDED_SIZE,
    ReferenceHead,
    write_head,
    write_padded,
    write_published,
)
from tests.support.tiny_models import VOCAB_SIZE, make_rows, ragged_calls, reference_model, run_all, write_checkpoint

pytestmark = pytest.mark.usefixtures("every_model_is_worth_two_threads")
MAX_ERROR = 1e-4
NUM_BLOCKS = 40
BLOCK_SIZE = 4
CONFIGS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4, "rope_theta": 500000.0},
    "many_heads": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "whole_vocabulary": {"draft_vocab_size": None},
}


class Built:
    """A target and a head that were built together, with references of both."""

    def __init__(self, root: Path, config: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> None:
        """config: changes of the head's. options: of build_engines."""
        self.source = write_checkpoint(root / "target", num_hidden_layers=NUM_TARGET_LAYERS)
        self.head_dir = write_head(root / "head", **config)
        self.directory = root / "engine"
        self.manifest = build_engines(self.source, self.head_dir, self.directory, kv_block_size=BLOCK_SIZE, **options)
        assert EngineManifest.load(self.directory) == self.manifest
        self.target_reference = reference_model(self.source)
        embedding = self.target_reference.get_parameter("model.embed_tokens.weight").detach()
        self.reference = ReferenceHead(self.head_dir, embedding)

    def features(self, token_ids: np.ndarray) -> torch.Tensor:
        """Returns the target's hidden states for the head, joined: [n, 3 * hidden_size]."""
        with torch.no_grad():
            run = self.target_reference(torch.from_numpy(token_ids)[None], output_hidden_states=True)
        return torch.cat([run.hidden_states[layer][0] for layer in FEATURE_LAYERS], dim=-1)

    def chain_behind(self, tokens: np.ndarray, num_draft_tokens: int) -> list[int]:
        """Drafts greedily with the head behind `tokens`, none of it from a cache."""
        token_ids, hidden = tokens[1:], self.reference.joined(self.features(tokens)[:-1])
        drafted: list[int] = []
        for _ in range(num_draft_tokens):
            logits, made = self.reference.run(token_ids, hidden)
            drafted.append(int(logits[-1].argmax()))
            token_ids, hidden = np.append(token_ids, drafted[-1]), torch.cat([hidden, made[-1:]])
        return drafted


def same_logits(found: np.ndarray, wanted: np.ndarray, error: float = MAX_ERROR) -> bool:
    """Returns whether logits are equal within the error, and -inf for the same ids."""
    is_known = np.isfinite(wanted)
    if not np.array_equal(is_known, np.isfinite(found)):
        return False
    return np.abs(found[is_known] - wanted[is_known]).max() <= error


def shuffled_tables(rng: np.random.Generator, num_sequences: int, width: int = 10) -> np.ndarray:
    return rng.permutation(NUM_BLOCKS)[: num_sequences * width].reshape(num_sequences, width)


@pytest.fixture(scope="module", params=CONFIGS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("eagle3"), CONFIGS[request.param], exit_layers=(4,))


class HeadReader:
    """A target and a head that share features."""

    target: ModelRunner
    head: ModelRunner

    def read(self, tokens: list[np.ndarray], starts: list[int], counts: list[int], tables: np.ndarray) -> np.ndarray:
        """Runs the target on these rows, then the head on the next tokens. Returns the head's logits."""
        run_all(self.target, make_rows(tokens, starts, counts, tables))
        return run_all(self.head, make_rows([t[1:] for t in tokens], starts, counts, tables))


class Runners(HeadReader):
    """Target and head of an engine directory, and the pool of features that they share."""

    def __init__(self, directory: Path, num_threads: int = 2) -> None:
        manifest, cores = EngineManifest.load(directory), CorePartition("test", tuple(range(num_threads)))
        assert manifest.draft is not None
        pools = [KvPool(model.spec, NUM_BLOCKS, BLOCK_SIZE) for model in (manifest.target, manifest.draft)]
        self.features = pools[1].features = pools[0].features
        models = manifest.target, manifest.draft
        self.target = LlvmRunner(models[0], directory, cores, pools[0], num_threads=num_threads)
        self.head = LlvmHeadRunner(models[1], directory, cores, pools[1], models[0], num_threads=num_threads)

    def features_of(self, num_tokens: int, table: np.ndarray) -> np.ndarray:
        """Returns the features [num_tokens, 3 * hidden_size] of the sequence with this block table."""
        blocks, offsets = np.divmod(np.arange(num_tokens), BLOCK_SIZE)
        return np.concatenate([array[table[blocks], offsets] for array in self.features.values()], axis=1)

    def close(self) -> None:
        self.target.close()
        self.head.close()


def check_rows_on_features(built: Built, runners: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Checks ragged chunks of three sequences against a dense run. Returns their tokens and block tables.

    The target is cut before a layer whose input the head reads.
    """
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB_SIZE, int(n)) for n in rng.integers(9, 38, 3)]
    tables = shuffled_tables(rng, 3)
    joined = [built.reference.joined(built.features(t)) for t in tokens]
    expected = [built.reference.run(t[1:], j[:-1])[0] for t, j in zip(tokens, joined, strict=True)]
    for call, wanted in ragged_calls(rng, tokens, expected, tables, 7):
        assert same_logits(runners.read(*call), wanted)
    for t, table in zip(tokens, tables, strict=True):
        features = runners.features_of(t.size - 1, table)
        assert np.abs(features - built.features(t)[:-1].numpy()).max() <= MAX_ERROR
    return tokens, tables


def test_rows_on_the_target_s_features_equal_a_dense_run(built: Built) -> None:
    runners = Runners(built.directory)
    check_rows_on_features(built, runners)
    assert list(runners.features) == list(FEATURE_LAYERS)
    runners.close()


def chain_of(runners: Runners, chunk: int, *, is_packed: bool) -> list[np.ndarray]:
    """Returns logits of three sequences: [20, vocab_size] from chunks, then [3, vocab_size] from 3 greedy steps."""
    sequences = [np.random.default_rng(seed).integers(0, VOCAB_SIZE, 21) for seed in range(3)]
    tables = np.random.default_rng(9).permutation(NUM_BLOCKS)[:18].reshape(3, 6)
    groups = [[0, 1, 2]] if is_packed else [[0], [1], [2]]
    found: list[np.ndarray] = []
    for group in groups:
        tokens, own = [sequences[i] for i in group], tables[group]
        parts = [
            runners.read(tokens, [first] * len(group), [min(chunk, 20 - first)] * len(group), own).reshape(
                len(group), -1, VOCAB_SIZE
            )
            for first in range(0, 20, chunk)
        ]
        read = np.concatenate(parts, axis=1)
        last = np.arange(1, len(group) + 1) * 20 - 1  # the head's own rows need its hidden states
        rows = make_rows([t[1:] for t in tokens], [0] * len(group), [20] * len(group), own, last)
        logits, hidden = runners.head.run_layer(rows, runners.head.run_segment(0, rows, None))
        steps = []
        for step in range(3):
            steps.append(logits.copy())
            newest = single_rows(steps[-1].argmax(axis=1), np.full(len(group), 20 + step), own)
            logits, hidden = runners.head.run_layer(newest, hidden)
        found += [np.concatenate([read[i], np.stack(steps)[:, i]]) for i in range(len(group))]
    return found


@pytest.mark.parametrize("built", ["gqa"], indirect=True)
def test_a_row_has_the_same_bits_in_any_company_on_any_threads(built: Built) -> None:
    expected = chain_of(Runners(built.directory, 1), 1, is_packed=False)
    assert all(np.isfinite(logits).sum() == 23 * 40 for logits in expected)  # the head knows 40 ids
    for num_threads in (1, 2, 3):
        runners = Runners(built.directory, num_threads)
        for chunk, is_packed in ((20, True), (7, True), (1, True), (20, False)):
            np.testing.assert_array_equal(chain_of(runners, chunk, is_packed=is_packed), expected)
        runners.close()


@pytest.mark.parametrize("built", ["gqa"], indirect=True)
def test_each_tensor_of_a_head_shows_in_its_logits(built: Built) -> None:
    """Negative control: the comparison notices a tensor that is missing or read from the wrong position."""
    rng, runners = np.random.default_rng(3), Runners(built.directory)
    tokens = rng.integers(0, VOCAB_SIZE, 12)
    logits = runners.read([tokens], [0], [11], shuffled_tables(rng, 1))

    def is_equal() -> bool:
        return same_logits(
            logits, built.reference.run(tokens[1:], built.reference.joined(built.features(tokens))[:-1])[0]
        )

    for name in [name for name in built.reference.tensors if name != "t2d"]:
        kept = built.reference.tensors[name]
        built.reference.tensors[name] = kept.roll(1, 0) if name == "d2t" else kept * 1.1
        assert not is_equal(), name
        built.reference.tensors[name] = kept
    assert is_equal()
    runners.close()


def test_a_head_reads_the_embedding_that_its_target_stores(tmp_path: Path) -> None:
    built = Built(tmp_path, weights="bf16", kv_cache_dtype="fp32")
    assert built.manifest.draft is not None
    assert built.manifest.target.weight_format.formats == ("bf16",) * 3
    assert built.manifest.draft.weight_format.name == FLOAT32_WEIGHTS.name
    stored, built.reference.embedding = built.reference.embedding, built.reference.embedding.clone()
    with torch.no_grad():
        for parameter in built.target_reference.parameters():  # including `stored`
            if parameter.ndim > 1:
                parameter.copy_(parameter.bfloat16().float())
    runners = Runners(built.directory)
    tokens = np.random.default_rng(4).integers(0, VOCAB_SIZE, 14)
    joined = built.reference.joined(built.features(tokens))[:-1]
    logits = runners.read([tokens], [0], [13], np.arange(4)[None])
    error = UNIT_ERROR if has_matrix_units() else MAX_ERROR  # of the target with halves
    assert not same_logits(logits, built.reference.run(tokens[1:], joined)[0], error)
    built.reference.embedding = stored
    assert same_logits(logits, built.reference.run(tokens[1:], joined)[0], error)
    sizes = [(built.directory / f"{name}.safetensors").stat().st_size for name in ("target", "draft")]
    assert sizes == [model.num_weight_bytes for model in (built.manifest.target, built.manifest.draft)]


def logits_of_layer(directory: Path, tokens: np.ndarray, hidden: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns logits of the engine's head for tokens and hidden states."""
    runners = Runners(directory)
    logits = runners.head.run_layer(make_rows([tokens], [0], [tokens.size], table), hidden)[0].copy()
    runners.close()
    return logits


def test_other_published_layouts_give_the_same_head(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    target, head, reference = write_published(tmp_path, rng)
    options = {"kv_block_size": BLOCK_SIZE, "kv_cache_dtype": "fp32"}
    manifest = build_engines(target, head, tmp_path / "halves", **options)
    assert manifest.target.spec.feature_layers == (1, 4, 7)
    assert manifest.draft is not None
    assert manifest.draft.spec.checkpoint_dtype == "BF16"
    assert manifest.draft.weight_format.name == "int8"
    # The kernel of float32 is one that other tests need too.
    build_engines(target, head, tmp_path / "engine", weights="fp32", draft_weights="fp32", **options)
    tokens, hidden = rng.integers(0, VOCAB_SIZE, 9), rng.normal(size=(9, HEAD["hidden_size"])).astype(np.float32)
    found = logits_of_layer(tmp_path / "engine", tokens, hidden, shuffled_tables(rng, 1))
    assert same_logits(found, reference.run(tokens, torch.from_numpy(hidden))[0])


def test_rows_that_pad_a_vocabulary_are_cut_from_heads_too(tmp_path: Path) -> None:
    target, head, reference = write_padded(tmp_path)
    manifest = build_engines(target, head, tmp_path / "engine", kv_block_size=BLOCK_SIZE)
    assert manifest.draft is not None
    assert (manifest.draft.spec.vocab_size, manifest.draft.spec.padded_vocab_size) == (VOCAB_SIZE, PADDED_SIZE)
    rng = np.random.default_rng(4)
    tokens, hidden = rng.integers(0, VOCAB_SIZE, 9), rng.normal(size=(9, HEAD["hidden_size"])).astype(np.float32)
    wanted, _ = reference.run(tokens, torch.from_numpy(hidden))
    assert np.isfinite(wanted[:, VOCAB_SIZE:]).any(), "the head must know an id that is cut"
    found = logits_of_layer(tmp_path / "engine", tokens, hidden, shuffled_tables(rng, 1))
    assert same_logits(found, wanted[:, :VOCAB_SIZE])
