"""The target writes its own training data: a question, then its answer, many conversations side by side.

Rows go through the engine's own runner, in slots with blocks of their own: no request comes or goes, so
there is nothing to schedule. Each row's features stay in the runner's pool until the conversation is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.llvm_runner import LlvmRunner
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import EngineManifest
from lab.train_head.conversations import Opener, State, WritingOptions
from lab.train_head.shards import Corpus, Dialogue, shard_paths, write_shard


class Writer(Protocol):
    """Writes conversations, one token of each per step."""

    def step(self) -> list[Dialogue]:
        """Runs one token of each conversation; returns those that ended."""
        ...

    def close(self) -> None: ...


class RunnerOfStates(LlvmRunner):
    """A runner that gives the last layer's output beside the logits."""

    def run_whole(self, rows: RowBatch) -> tuple[np.ndarray, np.ndarray]:
        """Logits [R, vocab_size] and hidden states [R, hidden_size], in buffers that the next call overwrites."""
        results = self._run(0, rows, None, None)
        return results.logits, results.hidden[: rows.logit_rows.size]


class LlvmWriter:
    """A Writer in `num_slots` slots of the engine's own runtime."""

    def __init__(self, engine_dir: Path, feature_layers: tuple[int, ...], options: WritingOptions, seed: int) -> None:
        """engine_dir: of runtime llvm, its target uncut. seed: of this run. Raises ConfigError, RequestError."""
        manifest = EngineManifest.load(engine_dir)
        self._rng = np.random.default_rng((options.seed, seed))
        self._opener = Opener(engine_dir, options, self._rng)
        spec = replace(manifest.target.spec, feature_layers=feature_layers)
        block_size = manifest.kv_block_size
        per_slot = -(-self._opener.max_tokens // block_size)
        self._tables = np.arange(options.num_slots * per_slot).reshape(options.num_slots, per_slot)
        self._pool = KvPool(spec, self._tables.size, block_size, dtype=manifest.kv_cache_dtype)
        cores = tuple(sorted(os.sched_getaffinity(0)))
        self._runner = RunnerOfStates(
            replace(manifest.target, spec=spec),
            engine_dir,
            CorePartition("cores", cores),
            self._pool,
            num_threads=min(options.num_threads or len(cores), len(cores)),
        )
        self._hidden = np.zeros((options.num_slots, per_slot * block_size, spec.hidden_size), np.float16)
        self._slots = [self._opener.open() for _ in range(options.num_slots)]

    def step(self) -> list[Dialogue]:
        num_slots = len(self._slots)
        lengths = np.array([len(slot.token_ids) for slot in self._slots])
        every = np.arange(num_slots)
        rows = RowBatch(
            token_ids=np.array([slot.token_ids[-1] for slot in self._slots], np.int64),
            cu_rows=np.arange(num_slots + 1),
            context_lens=lengths - 1,
            block_tables=self._tables,
            logit_rows=every,
        )
        logits, hidden = self._runner.run_whole(rows)
        self._hidden[every, lengths - 1] = hidden
        done: list[Dialogue] = []
        for i, slot in enumerate(self._slots):
            state = slot.advance(logits[i], None, self._rng)
            if state is State.DONE:
                done.append(self._whole(i))
            if state is not State.OPEN:
                self._slots[i] = self._opener.open()  # it writes over the blocks of the one before
        return done

    def close(self) -> None:
        self._runner.close()

    def _whole(self, index: int) -> Dialogue:
        table, n = self._tables[index], len(self._slots[index].best_ids)
        features = [pool[table].reshape(-1, pool.shape[-1])[:n] for pool in self._pool.features.values()]
        joined = np.concatenate(features, axis=1).astype(np.float16)
        return self._slots[index].dialogue(joined, self._hidden[index, :n].copy())


def write_dialogues(
    open_writer: Callable[[int], Writer],
    directory: Path,
    *,
    num_tokens: int,
    dialogues_per_shard: int,
    on_tokens: Callable[[int], None],
) -> None:
    """Adds shards to a directory until it holds num_tokens. on_tokens is told how many there are, after each shard.

    open_writer takes a seed, another one in each run. What was begun when a run is cut off is lost: less than a
    shard, and what lies in slots.
    """
    directory.mkdir(parents=True, exist_ok=True)
    total, next_index = Corpus(directory).num_tokens, len(shard_paths(directory))
    if total >= num_tokens:
        return
    writer = open_writer(next_index)
    done: list[Dialogue] = []
    try:
        while total < num_tokens:
            done += writer.step()
            if len(done) >= dialogues_per_shard:
                write_shard(directory, next_index, done)
                total += sum(dialogue.num_tokens for dialogue in done)
                next_index, done = next_index + 1, []
                on_tokens(total)
    finally:
        writer.close()
