"""EAGLE-3 heads whose layer is a kernel of ours: against a dense reference, in any company, in every format.

Whole engines with such heads are in test_eagle3_drafting.py, with those of runtime onnxruntime.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engines.arrays import CheckpointError
from engines.build import build_engines
from faser_backend.core.batch import RowBatch
from faser_backend.core.model import FLOAT32_WEIGHTS
from faser_backend.device import llvm_weights
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.llvm_head import LlvmHeadRunner
from faser_backend.device.llvm_runner import LlvmRunner
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import EngineManifest
from plugins.row_units import has_matrix_units
from tests.eagle3_models import FEATURE_LAYERS, NUM_TARGET_LAYERS, write_head
from tests.precision import UNIT_ERROR
from tests.test_eagle3 import BLOCK_SIZE, CONFIGS, MAX_ERROR, NUM_BLOCKS, Built, same_logits, shuffled_tables
from tests.test_eagle3_drafting import make_requests, tokens_of
from tests.tiny_models import VOCAB_SIZE, make_rows, run_all, write_checkpoint


@pytest.fixture(autouse=True)
def every_model_is_worth_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm_weights, "ONE_THREAD_BYTES", 0)


@pytest.fixture(scope="module", params=CONFIGS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("eagle3"), runtime="llvm", exit_layers=(4,), **CONFIGS[request.param])


class Runners:
    """Target and head of an engine directory, and the pool of features that they share."""

    def __init__(self, directory: Path, num_threads: int = 2) -> None:
        manifest, cores = EngineManifest.load(directory), CorePartition("test", tuple(range(num_threads)))
        assert manifest.draft is not None
        pools = [KvPool(model.spec, NUM_BLOCKS, BLOCK_SIZE) for model in (manifest.target, manifest.draft)]
        self.features = pools[1].features = pools[0].features
        models = manifest.target, manifest.draft
        self.target = LlvmRunner(models[0], directory, cores, pools[0], num_threads=num_threads)
        self.head = LlvmHeadRunner(models[1], directory, cores, pools[1], models[0], num_threads=num_threads)

    def read(self, tokens: list[np.ndarray], starts: list[int], counts: list[int], tables: np.ndarray) -> np.ndarray:
        """The target reads these rows, then the head the next tokens beside them. Returns the head's logits."""
        run_all(self.target, make_rows(tokens, starts, counts, tables))
        rows = make_rows([t[1:] for t in tokens], starts, counts, tables)
        return run_all(self.head, rows)

    def features_of(self, num_tokens: int, table: np.ndarray) -> np.ndarray:
        """[num_tokens, 3 * hidden_size] of the sequence that the table is of."""
        blocks, offsets = np.divmod(np.arange(num_tokens), BLOCK_SIZE)
        return np.concatenate([array[table[blocks], offsets] for array in self.features.values()], axis=1)

    def close(self) -> None:
        self.target.close()
        self.head.close()


def test_rows_on_the_target_s_features_equal_a_dense_run(built: Built) -> None:
    """Ragged chunks of three sequences; the target is cut before a layer whose input is wanted."""
    rng, runners = np.random.default_rng(0), Runners(built.directory)
    tokens = [rng.integers(0, VOCAB_SIZE, int(n)) for n in rng.integers(9, 38, 3)]
    tables = shuffled_tables(rng, 3)
    joined = [built.reference.joined(built.features(t)) for t in tokens]
    expected = [built.reference.run(t[1:], j[:-1])[0] for t, j in zip(tokens, joined, strict=True)]
    starts, lengths = np.zeros(3, np.int64), np.array([t.size - 1 for t in tokens])
    while (starts < lengths).any():
        live = np.flatnonzero(starts < lengths)
        counts = [int(rng.integers(1, min(lengths[i] - starts[i], 7) + 1)) for i in live]
        logits = runners.read([tokens[i] for i in live], starts[live].tolist(), counts, tables[live])
        wanted = [expected[i][starts[i] : starts[i] + n] for i, n in zip(live, counts, strict=True)]
        assert same_logits(logits, np.concatenate(wanted))
        starts[live] += counts
    assert list(runners.features) == list(FEATURE_LAYERS)
    for t, table in zip(tokens, tables, strict=True):
        features = runners.features_of(t.size - 1, table)
        assert np.abs(features - built.features(t)[:-1].numpy()).max() <= MAX_ERROR
    runners.close()


def chain_of(runners: Runners, chunk: int, *, is_packed: bool) -> list[np.ndarray]:
    """Of three sequences [20, vocab_size] logits of what is read in chunks, then of 3 greedy steps [3, vocab_size]."""
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
        last = np.arange(1, len(group) + 1) * 20 - 1  # all is read again: the head's own rows need its hidden states
        rows = make_rows([t[1:] for t in tokens], [0] * len(group), [20] * len(group), own, last)
        logits, hidden = runners.head.run_layer(rows, runners.head.run_segment(0, rows, None))
        steps = []
        for step in range(3):
            steps.append(logits.copy())
            newest = RowBatch(
                token_ids=steps[-1].argmax(axis=1),
                cu_rows=np.arange(len(group) + 1),
                context_lens=np.full(len(group), 20 + step),
                block_tables=own,
                logit_rows=np.arange(len(group)),
            )
            logits, hidden = runners.head.run_layer(newest, hidden)
        found += [np.concatenate([read[i], np.stack(steps)[:, i]]) for i in range(len(group))]
    return found


@pytest.mark.parametrize("built", ["gqa"], indirect=True)
def test_a_row_has_the_same_bits_in_any_company_on_any_threads(built: Built) -> None:
    alone = Runners(built.directory, 1)
    expected = chain_of(alone, 1, is_packed=False)
    assert all(np.isfinite(logits).sum() == 23 * 40 for logits in expected)  # the head knows 40 ids
    for num_threads in (1, 2, 3):
        runners = Runners(built.directory, num_threads)
        for chunk, is_packed in ((20, True), (7, True), (1, True), (20, False)):
            np.testing.assert_array_equal(chain_of(runners, chunk, is_packed=is_packed), expected)
        runners.close()


@pytest.mark.parametrize("built", ["gqa"], indirect=True)
def test_each_tensor_of_a_head_shows_in_its_logits(built: Built) -> None:
    """Negative control: the comparison would notice a tensor that is left out or read from the wrong place."""
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
    """The target's matrices are halves, the head's float32, as its checkpoint has them."""
    built = Built(tmp_path, runtime="llvm", weights="bf16", kv_cache_dtype="fp32")
    assert built.manifest.draft is not None
    assert built.manifest.target.weight_format.formats == ("bf16",) * 3
    assert built.manifest.draft.weight_format.name == FLOAT32_WEIGHTS.name
    stored, built.reference.embedding = built.reference.embedding, built.reference.embedding.clone()
    with torch.no_grad():
        for parameter in built.target_reference.parameters():  # `stored` is among them
            if parameter.ndim > 1:
                parameter.copy_(parameter.bfloat16().float())
    runners = Runners(built.directory)
    tokens = np.random.default_rng(4).integers(0, VOCAB_SIZE, 14)
    joined = built.reference.joined(built.features(tokens))[:-1]
    logits = runners.read([tokens], [0], [13], np.arange(4)[None])
    error = UNIT_ERROR if has_matrix_units() else MAX_ERROR  # of what the target computes of its halves
    assert not same_logits(logits, built.reference.run(tokens[1:], joined)[0], error)
    built.reference.embedding = stored
    assert same_logits(logits, built.reference.run(tokens[1:], joined)[0], error)
    sizes = [(built.directory / f"{name}.safetensors").stat().st_size for name in ("target", "draft")]
    assert sizes == [model.num_weight_bytes for model in (built.manifest.target, built.manifest.draft)]


def test_tokens_equal_plain_decoding_with_a_target_of_integers(tmp_path: Path) -> None:
    """On two threads; greedy and sampled, and with sequences that are preempted."""
    built, requests = Built(tmp_path, runtime="llvm", weights="int8", kv_cache_dtype="fp32"), make_requests()
    plain = tokens_of(built, "none", requests)
    for options in ({}, {"num_kv_blocks": 32}):
        assert tokens_of(built, "fixed:4", requests, **options) == plain


def test_what_is_not_for_heads_is_refused_by_name(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", num_hidden_layers=NUM_TARGET_LAYERS)
    head = write_head(tmp_path / "head")
    with pytest.raises(CheckpointError, match="weights of target = 'int8': pairs with an EAGLE-3 head"):
        build_engines(target, head, tmp_path / "engine", weights="int8")
    assert not (tmp_path / "engine").exists()
