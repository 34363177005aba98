"""Engines against transformers' Llama: packed, paged, chunked and cut runs give the dense logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest
import torch

from engines.build import build_engines
from faser_backend.device.onnx_runtime import OrtRunner
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import EngineManifest
from tests.tiny_models import make_rows, reference_logits, reference_model, run_all, write_checkpoint

ONE_CORE = CorePartition("test", (0,))
MAX_ERROR = 1e-4
NUM_BLOCKS = 40

CONFIGS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4, "hidden_act": "silu"},
    "one_kv_head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "wide_heads": {"head_dim": 16},
    "narrow_heads": {"head_dim": 4, "rope_theta": 500000.0},
    "other_rope": {"rope_theta": 100.0, "rms_norm_eps": 1e-3},
    "one_layer": {"num_hidden_layers": 1},
}


class Built:
    """A checkpoint built twice over: `manifest` and its directory, and the reference."""

    def __init__(self, root: Path, exit_layers: tuple[int, ...] = (), block_size: int = 4, **config: Any) -> None:
        source = write_checkpoint(root / "source", **config)
        self.directory = root / "engine"
        self.manifest = build_engines(source, source, self.directory, exit_layers=exit_layers, kv_block_size=block_size)
        assert EngineManifest.load(self.directory) == self.manifest
        self.reference = reference_model(source)
        self.block_size = block_size

    def runner(self) -> OrtRunner:
        return OrtRunner(self.manifest.target, self.directory, NUM_BLOCKS, self.block_size, ONE_CORE)


def random_sequences(rng: np.random.Generator, lengths: list[int], vocab_size: int) -> list[np.ndarray]:
    return [rng.integers(0, vocab_size, length) for length in lengths]


def shuffled_tables(rng: np.random.Generator, num_sequences: int, width: int) -> np.ndarray:
    return rng.permutation(NUM_BLOCKS)[: num_sequences * width].reshape(num_sequences, width)


def check_ragged_run(built: Built, seed: int) -> None:
    """Prefill in ragged chunks, then decode in ragged steps, and compare every row's logits."""
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(9, 40, 3)]
    sequences = random_sequences(rng, lengths, built.manifest.target.spec.vocab_size)
    expected = [reference_logits(built.reference, tokens) for tokens in sequences]
    tables = shuffled_tables(rng, 3, 10)
    runner = built.runner()
    starts = [0, 0, 0]
    while any(start < length for start, length in zip(starts, lengths, strict=True)):
        live = [i for i in range(3) if starts[i] < lengths[i]]
        counts = [int(rng.integers(1, min(lengths[i] - starts[i], 9) + 1)) for i in live]
        live_starts = [starts[i] for i in live]
        rows = make_rows([sequences[i] for i in live], live_starts, counts, tables[live])
        wanted = np.concatenate([expected[i][s : s + n] for i, s, n in zip(live, live_starts, counts, strict=True)])
        assert np.abs(run_all(runner, rows) - wanted).max() <= MAX_ERROR
        for i, count in zip(live, counts, strict=True):
            starts[i] += count
    runner.check_integrity()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_a_dense_run(name: str, tmp_path: Path) -> None:
    built = Built(tmp_path, **CONFIGS[name])
    for seed in range(2):
        check_ragged_run(built, seed)


@pytest.mark.parametrize("name", ["gqa", "tied"])
@pytest.mark.parametrize("exit_layers", [(1,), (1, 2)])
def test_cut_engines_give_the_same_logits(name: str, exit_layers: tuple[int, ...], tmp_path: Path) -> None:
    built = Built(tmp_path, exit_layers=exit_layers, **CONFIGS[name])
    assert built.runner().num_segments == len(exit_layers) + 1
    check_ragged_run(built, seed=7)


@pytest.mark.parametrize("block_size", [1, 16, 5])
def test_any_block_size(block_size: int, tmp_path: Path) -> None:
    built = Built(tmp_path, block_size=block_size)
    rng = np.random.default_rng(3)
    sequence = random_sequences(rng, [20], 97)
    tables = rng.permutation(NUM_BLOCKS)[:20][None]
    runner = built.runner()
    first = run_all(runner, make_rows(sequence, [0], [13], tables))
    second = run_all(runner, make_rows(sequence, [13], [7], tables))
    wanted = reference_logits(built.reference, sequence[0])
    assert np.abs(np.concatenate([first, second]) - wanted).max() <= MAX_ERROR


def test_half_precision_checkpoints_are_read(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        built = Built(tmp_path / str(dtype), dtype=dtype)
        check_ragged_run(built, seed=1)


def test_a_wrong_table_changes_the_logits(tmp_path: Path) -> None:
    """Negative control: the comparison notices a sequence that reads another's blocks."""
    built = Built(tmp_path)
    rng = np.random.default_rng(0)
    sequences = random_sequences(rng, [12, 12], 97)
    tables = shuffled_tables(rng, 2, 3)
    runner = built.runner()
    run_all(runner, make_rows(sequences, [0, 0], [11, 11], tables))
    swapped = run_all(runner, make_rows(sequences, [11, 11], [1, 1], tables[::-1].copy()))
    wanted = np.stack([reference_logits(built.reference, tokens)[-1] for tokens in sequences])
    assert np.abs(swapped - wanted).max() > 100 * MAX_ERROR


def test_prefill_without_logits_leaves_the_same_cache(tmp_path: Path) -> None:
    built = Built(tmp_path)
    rng = np.random.default_rng(5)
    sequences = random_sequences(rng, [11, 6], 97)
    tables = shuffled_tables(rng, 2, 3)
    silent, spoken = built.runner(), built.runner()
    rows = make_rows(sequences, [0, 0], [11, 6], tables, logit_rows=np.zeros(0, np.int64))
    assert run_all(silent, rows).shape == (0, 97)
    some = run_all(spoken, make_rows(sequences, [0, 0], [11, 6], tables, logit_rows=np.array([16, 10])))
    wanted = np.stack([reference_logits(built.reference, sequences[i])[-1] for i in (1, 0)])
    assert np.abs(some - wanted).max() <= MAX_ERROR
    np.testing.assert_allclose(silent.pool.storage, spoken.pool.storage, atol=1e-5)
    assert np.abs(spoken.pool.storage).max() > 0


@pytest.mark.parametrize("name", ["gqa", "tied"])
def test_exit_scores_are_rows_of_the_head(name: str, tmp_path: Path) -> None:
    built = Built(tmp_path, exit_layers=(1, 2), **CONFIGS[name])
    rng = np.random.default_rng(2)
    sequences = random_sequences(rng, [9, 5], 97)
    rows = make_rows(sequences, [0, 0], [9, 5], shuffled_tables(rng, 2, 3))
    candidates = rng.integers(0, 97, (14, 6))
    runner, reference = built.runner(), built.reference
    hidden = None
    for segment in (0, 1):
        hidden, scores = runner.run_segment_with_scores(segment, rows, hidden, candidates)
        hidden = hidden.copy()
        with torch.no_grad():
            logits = reference.lm_head(reference.model.norm(torch.from_numpy(hidden))).numpy()
        assert np.abs(scores - np.take_along_axis(logits, candidates, 1)).max() <= MAX_ERROR


def test_rows_pruned_between_segments_do_not_touch_the_kept_ones(tmp_path: Path) -> None:
    built = Built(tmp_path, exit_layers=(1,))
    rng = np.random.default_rng(4)
    sequences = random_sequences(rng, [14, 14], 97)
    tables = shuffled_tables(rng, 2, 4)
    runner = built.runner()
    run_all(runner, make_rows(sequences, [0, 0], [8, 8], tables))
    hidden = runner.run_segment(0, make_rows(sequences, [8, 8], [5, 5], tables), None)
    kept = np.array([0, 1, 5, 6, 7, 8])  # 2 of 5 rows, 4 of 5 rows
    logits = runner.run_segment(1, make_rows(sequences, [8, 8], [2, 4], tables), hidden[kept])
    expected = [reference_logits(built.reference, tokens) for tokens in sequences]
    assert np.abs(logits - np.concatenate([expected[0][8:10], expected[1][8:12]])).max() <= MAX_ERROR
    resumed = run_all(runner, make_rows(sequences, [10, 12], [4, 2], tables))
    assert np.abs(resumed - np.concatenate([expected[0][10:], expected[1][12:]])).max() <= MAX_ERROR


def test_parts_of_segments_are_valid_standard_onnx(tmp_path: Path) -> None:
    """Nothing but standard ops, cut at every attention; the parts' borders are those of the manifest."""
    built = Built(tmp_path, exit_layers=(1,))
    for segment in built.manifest.target.segments:
        layers = range(segment.first_layer, segment.last_layer)
        assert len(segment.files) == len(layers) + 1
        models = []
        for file in segment.files:
            onnx.checker.check_model(built.directory / file.name, full_check=True)
            models.append(onnx.load(built.directory / file.name, load_external_data=False))
        assert {node.domain for model in models for node in model.graph.node} == {""}
        known = {tensor.name for tensor in (*segment.inputs, *segment.outputs)}
        inner = {f"{name}.{layer}" for layer in layers for name in ("q", "k", "v", "attended")}
        inner |= {f"carried.{cut}.0" for cut in range(len(layers))}
        borders = [tensor.name for model in models for tensor in (*model.graph.input, *model.graph.output)]
        first_is_carried = segment.first_layer == 0  # else the residual of the first layer is the input itself
        assert set(borders) == known | (inner if first_is_carried else inner - {"carried.0.0"})
