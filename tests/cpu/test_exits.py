"""Early exit on the runner: scores against torch, and the writes of rows that leave after a segment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.batch import RowBatch
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.runner import LlvmRunner
from faser_backend.device.partition import CorePartition
from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.rows import keep_rows
from tests.support.tiny_models import make_rows, reference_logits, reference_model, run_all, write_checkpoint

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 4, 24, 3
EXIT_LAYER = 1
STARTS, COUNTS = [3, 6, 0], [4, 5, 3]  # a verification: tokens in the pool, rows of each sequence
TABLES = np.array([[5, 9, 0], [7, 1, 20], [2, 0, 0]])


class Scene:
    """Three prefilled sequences on a pool of noise, and the rows that verify their next tokens."""

    def __init__(self, root: Path) -> None:
        source = write_checkpoint(root / "source", num_hidden_layers=NUM_LAYERS)
        build_engines(source, source, root / "engine", exit_layers=(EXIT_LAYER,), kv_block_size=BLOCK_SIZE)
        self.model = reference_model(source)
        target = EngineManifest.load(root / "engine").target
        pool = KvPool(target.spec, NUM_BLOCKS, BLOCK_SIZE)
        self.runner = LlvmRunner(target, root / "engine", CorePartition("test", (0,)), pool)
        rng = np.random.default_rng(2)
        self.sequences = [rng.integers(0, 97, 12) for _ in STARTS]
        self.storage = self.runner.pool.storage
        self.storage[:] = rng.standard_normal(self.storage.shape).astype(np.float32)
        for sequence, start, table in zip(self.sequences, STARTS, TABLES, strict=True):
            if start:
                run_all(self.runner, make_rows([sequence], [0], [start], table[None]))
        self.rows = make_rows(self.sequences, STARTS, COUNTS, TABLES)
        self.candidates = rng.integers(0, 97, (self.rows.num_rows, 4))

    def run_first(self) -> tuple[np.ndarray, np.ndarray]:
        return self.runner.run_segment_with_scores(0, self.rows, None, self.candidates)

    def positions(self, num_from: list[int], num_to: list[int]) -> list[tuple[int, int]]:
        """Returns (block, offset) of rows [num_from, num_to) of each sequence."""
        spans = zip(STARTS, num_from, num_to, TABLES, strict=True)
        return [
            (int(table[position // BLOCK_SIZE]), position % BLOCK_SIZE)
            for start, first, last, table in spans
            for position in range(start + first, start + last)
        ]

    def is_changed(self, before: np.ndarray, layer: int) -> np.ndarray:
        """Returns [NUM_BLOCKS, BLOCK_SIZE]: the positions written, by all heads or by none."""
        changed = (
            (self.storage != before)[layer][:, :, :NUM_BLOCKS]
            .transpose(2, 3, 0, 1, 4)
            .reshape(NUM_BLOCKS, BLOCK_SIZE, -1)
        )
        assert (changed.all(axis=2) == changed.any(axis=2)).all()
        return changed.all(axis=2)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def shallow_logits(scene: Scene) -> np.ndarray:
    """Returns [T, V]: torch's head on the hidden states of the exit layer."""
    parts = []
    with torch.no_grad():
        for sequence, start, count in zip(scene.sequences, STARTS, COUNTS, strict=True):
            states = scene.model(torch.from_numpy(sequence)[None], output_hidden_states=True).hidden_states
            shallow = scene.model.model.norm(states[EXIT_LAYER][0, start : start + count])
            parts.append(scene.model.lm_head(shallow).numpy())
    return np.concatenate(parts)


def test_scores_are_the_heads_view_of_a_shallow_model(scene: Scene) -> None:
    assert scene.runner.exits == {0} and scene.runner.num_layers == (EXIT_LAYER, NUM_LAYERS - EXIT_LAYER)
    hidden, scores = scene.run_first()
    expected = np.take_along_axis(shallow_logits(scene), scene.candidates, axis=1)
    np.testing.assert_allclose(scores, expected, atol=2e-4)
    hidden, scores = hidden.copy(), scores.copy()
    plain = scene.runner.run_segment(0, scene.rows, None)
    np.testing.assert_array_equal(plain, hidden)  # scores change nothing
    fewer = scene.runner.run_segment_with_scores(0, scene.rows, None, scene.candidates[:, :2])[1]
    np.testing.assert_allclose(fewer, scores[:, :2], atol=1e-5)


@pytest.mark.parametrize("num_kept", [[4, 5, 3], [2, 5, 1], [1, 1, 1], [4, 1, 2]])
def test_rows_that_are_kept_end_as_if_nobody_had_left(scene: Scene, num_kept: list[int]) -> None:
    hidden, _ = scene.run_first()
    rows, kept = keep_rows(scene.rows, np.array(num_kept))
    logits = scene.runner.run_segment(1, rows, scene.runner.take_rows(hidden, kept))
    expected = [
        reference_logits(scene.model, sequence)[start : start + count]
        for sequence, start, count in zip(scene.sequences, STARTS, num_kept, strict=True)
    ]
    np.testing.assert_allclose(logits, np.concatenate(expected), atol=1e-3)


def test_rows_that_left_touch_no_deeper_layer(scene: Scene) -> None:
    before, num_kept = scene.storage.copy(), [2, 5, 1]
    rows, kept = keep_rows(scene.rows, np.array(num_kept))
    hidden = scene.runner.take_rows(scene.run_first()[0], kept)
    assert not (scene.storage != before)[EXIT_LAYER:].any(), "the first segment writes its own layers alone"
    scene.runner.run_segment(1, rows, hidden)
    for layer in range(NUM_LAYERS):
        written = {(int(block), int(offset)) for block, offset in np.argwhere(scene.is_changed(before, layer))}
        assert written == set(scene.positions([0, 0, 0], COUNTS if layer < EXIT_LAYER else num_kept))


def test_positions_that_left_are_computed_by_the_next_step(scene: Scene) -> None:
    num_kept = [2, 1, 1]
    rows, kept = keep_rows(scene.rows, np.array(num_kept))
    scene.runner.run_segment(1, rows, scene.runner.take_rows(scene.run_first()[0], kept))
    starts = [start + kept for start, kept in zip(STARTS, num_kept, strict=True)]
    logits = run_all(scene.runner, make_rows(scene.sequences, starts, [2, 2, 2], TABLES))
    expected = [
        reference_logits(scene.model, sequence)[start : start + 2]
        for sequence, start in zip(scene.sequences, starts, strict=True)
    ]
    np.testing.assert_allclose(logits, np.concatenate(expected), atol=1e-3)


def test_segments_without_an_exit_score_nothing(scene: Scene) -> None:
    hidden, _ = scene.run_first()
    rows: RowBatch = scene.rows
    with pytest.raises(AssertionError, match="segment 1 has no exit scores"):
        scene.runner.run_segment_with_scores(1, rows, hidden, scene.candidates)
