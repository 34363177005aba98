"""What stored formats of weights cost and bring: a built engine beside one of float32 weights.

Both models read the same texts, which the float32 one wrote from random tokens, and their logits are compared;
then they take turns at calls of 1 and of 16 rows. Knows nothing of how engines are built.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.batch import RowBatch
from faser_backend.core.model import FLOAT32_WEIGHTS, WeightFormat
from faser_backend.manifest import EngineManifest, ModelEngine
from faser_backend.pipeline.model_call import run_model
from faser_backend.serving.runtimes import open_runtime

SIDES = ("target", "draft")
NUM_TEXTS = 8
NUM_RANDOM_TOKENS = 8  # that each text begins with
TEXT_LENGTH = 64
SEED = 0
TIMED_ROWS = (1, 16)  # one per sequence
TIMED_CALLS = 40
MAX_TIMED_S = 2.0  # per number of rows; at least one call of each


@dataclass(frozen=True, slots=True)
class WeightCost:
    """Of one model of an engine."""

    side: str  # "target" or "draft"
    format: WeightFormat
    num_file_bytes: int
    num_float32_bytes: int
    speedups: dict[int, float]  # rows of a call -> calls per second, as a multiple of those with float32

    def __str__(self) -> str:
        accuracy = self.format
        speeds = ", ".join(
            f"{ratio:.2f}x at {num_rows} row{'s'[: num_rows > 1]}" for num_rows, ratio in self.speedups.items()
        )
        return (
            f"{self.side} weights {accuracy.title}: {self.num_file_bytes / self.num_float32_bytes:.0%} of the bytes of "
            f"fp32; same best token in {accuracy.greedy_agreement:.2%} of {accuracy.num_rows} rows; logits differ by "
            f"{accuracy.mean_logit_difference:.2g} on average, {accuracy.max_logit_difference:.2g} at most; "
            f"calls per second {speeds}"
        )


def measure_weights(engine_dir: Path, float32_dir: Path) -> list[WeightCost]:
    """Of every model of the first engine that has no float32 weights. float32_dir: the same pair with them.

    Accuracy, which is the same at every build, is entered into the engine's manifest; speed, which is not, is
    only returned.
    """
    manifest, reference = EngineManifest.load(engine_dir), EngineManifest.load(float32_dir)
    costs = []
    for side in SIDES:
        model, float32_model = getattr(manifest, side), getattr(reference, side)
        if model is None or model.spec.reads_target or model.weight_format.name == FLOAT32_WEIGHTS.name:
            continue
        runner = TextRunner(model, engine_dir, manifest)
        float32_runner = TextRunner(float32_model, float32_dir, reference)
        measured = compare_logits(model.weight_format, runner, float32_runner)
        speedups = {num_rows: _speedup(runner, float32_runner, num_rows) for num_rows in TIMED_ROWS}
        costs.append(WeightCost(side, measured, model.weights.num_bytes, float32_model.weights.num_bytes, speedups))
        manifest = replace(manifest, **{side: replace(model, weight_format=measured)})
    manifest.save(engine_dir)
    return costs


class TextRunner:
    """A model whose pool has room for 16 texts, each with blocks of its own."""

    def __init__(self, model: ModelEngine, engine_dir: Path, manifest: EngineManifest) -> None:
        self.length = min(TEXT_LENGTH, model.spec.max_context)
        self.vocab_size = model.spec.vocab_size
        num_blocks = -(-self.length // manifest.kv_block_size)
        self._tables = np.arange(max(TIMED_ROWS) * num_blocks).reshape(-1, num_blocks)
        runtime = open_runtime(engine_dir, manifest, EngineConfig())
        pool = runtime.open_pool(model, self._tables.size)
        self._runner = runtime.open_runner(model, runtime.menu.whole, pool)

    def logits(self, tokens: np.ndarray, context_len: int, *, of_all_rows: bool = True) -> np.ndarray:
        """tokens [B, n] that follow context_len others of their texts -> logits [B * n or B, V], lent."""
        num_texts, num_rows = tokens.shape
        last_rows = np.arange(1, num_texts + 1) * num_rows - 1
        rows = RowBatch(
            token_ids=tokens.reshape(-1),
            cu_rows=np.arange(num_texts + 1) * num_rows,
            context_lens=np.full(num_texts, context_len),
            block_tables=self._tables[:num_texts],
            logit_rows=np.arange(tokens.size) if of_all_rows else last_rows,
        )
        return np.asarray(run_model(self._runner, rows))

    def write_texts(self) -> np.ndarray:
        """[NUM_TEXTS, length]: random tokens, and what follows them greedily."""
        random = np.random.default_rng(SEED)
        texts = random.integers(self.vocab_size, size=(NUM_TEXTS, self.length))
        start = min(NUM_RANDOM_TOKENS, self.length)
        next_logits = self.logits(texts[:, :start], 0, of_all_rows=False)
        for position in range(start, self.length):
            texts[:, position] = next_logits.argmax(axis=1)
            next_logits = self.logits(texts[:, position : position + 1], position)
        return texts


def compare_logits(stored: WeightFormat, runner: TextRunner, float32_runner: TextRunner) -> WeightFormat:
    """The format `stored` of `runner` beside float32, over texts that the latter writes; one text at a time."""
    agreements, means, largest = [], [], 0.0
    texts = float32_runner.write_texts()
    for text in texts:
        logits, expected = (each.logits(text[None], 0) for each in (runner, float32_runner))
        agreements.append(float((logits.argmax(axis=1) == expected.argmax(axis=1)).mean()))
        differences = np.abs(logits - expected)
        means.append(float(differences.mean()))
        largest = max(largest, float(differences.max()))
    agreement, mean = float(np.mean(agreements)), float(np.mean(means))
    return replace(
        stored,
        num_rows=texts.size,
        greedy_agreement=agreement,
        mean_logit_difference=mean,
        max_logit_difference=largest,
    )


def _speedup(runner: TextRunner, float32_runner: TextRunner, num_rows: int) -> float:
    """Calls of one row for each of num_rows texts, in turn; the ratio of the fastest."""
    runners, seconds = (runner, float32_runner), ([], [])
    tokens = np.zeros((num_rows, 1), np.int64)
    began = time.perf_counter()
    for _ in range(TIMED_CALLS):
        for each, calls in zip(runners, seconds, strict=True):
            start = time.perf_counter()
            each.logits(tokens, runner.length - 1)
            calls.append(time.perf_counter() - start)
        if time.perf_counter() - began > MAX_TIMED_S:
            break
    return min(seconds[1]) / min(seconds[0])
