"""Calls of an engine directory's target alone, one sequence at a time: no engine, no scheduler."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.config import EngineConfig
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.rows import run_model
from faser_backend.serving.runtimes import open_runtime


class OpenTarget:
    """The target of an engine directory, with room for one text.

    is_filled: its pool holds numbers. Pages that were never written are all one page, which stays in the cache:
    attention then looks far too fast.
    """

    def __init__(
        self, engine_dir: Path, max_tokens: int, *, num_threads: int | None = None, is_filled: bool = False
    ) -> None:
        self.manifest = EngineManifest.load(engine_dir)
        target = self.manifest.target
        self._num_blocks = -(-max_tokens // self.manifest.kv_block_size)
        self._runtime = open_runtime(engine_dir, self.manifest, EngineConfig(num_threads=num_threads))
        pool = self._runtime.open_pool(target, self._num_blocks)
        if is_filled:
            numbers = np.random.default_rng(0).standard_normal(target.spec.head_dim)
            self._runtime.fill_pool(pool, numbers.astype(np.float32))
        self._runner = self._runtime.open_runner(target, self._runtime.menu.whole, pool)

    def logits(self, token_ids: np.ndarray, context_len: int = 0, num_logits: int = 1) -> np.ndarray:
        """Returns logits [num_logits, vocab_size] of the last tokens, after context_len others, until the next call."""
        rows = RowBatch(
            token_ids=np.asarray(token_ids, np.int64),
            cu_rows=np.array([0, len(token_ids)]),
            context_lens=np.array([context_len]),
            block_tables=np.arange(self._num_blocks)[None],
            logit_rows=np.arange(len(token_ids) - num_logits, len(token_ids)),
        )
        return np.asarray(run_model(self._runner, rows))

    def close(self) -> None:
        self._runner.close()
        self._runtime.close()
