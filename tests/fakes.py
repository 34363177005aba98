"""A fake of the runner port whose answers depend on every KV entry that a real model would read.

`HashRunner` stores token ids in its paged pool. A row's logits are a pseudo-random function of the
last `memory` tokens before it, read back through the block table: a wrong block, a stale entry or a
missed truncation changes the logits, and with them the tokens.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.batch import RowBatch


class HashRunner:
    """memory: how many trailing tokens the logits depend on. noise: deviation from the shared model."""

    num_segments = 1
    num_layers = (1,)
    exits: frozenset[int] = frozenset()

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, *, memory: int = 10**6, noise: float = 0.0):
        self.vocab_size = vocab_size
        self.memory = memory
        self.noise = noise
        self.block_size = block_size
        self.pool = np.full((num_blocks, block_size), -1, np.int64)
        self._known: dict[bytes, np.ndarray] = {}
        self.num_calls = 0
        self.fails_on_token: int | None = None

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        assert segment == 0 and hidden is None
        assert rows.token_ids.min() >= 0 and rows.token_ids.max() < self.vocab_size
        self.num_calls += 1
        if self.fails_on_token is not None and (rows.token_ids == self.fails_on_token).any():
            raise RuntimeError("the fake was told to fail")
        wanted = set(rows.logit_rows.tolist())
        logits = {}
        for index in range(rows.num_sequences):
            table, start = rows.block_tables[index], int(rows.context_lens[index])
            for offset, row in enumerate(range(int(rows.cu_rows[index]), int(rows.cu_rows[index + 1]))):
                position = start + offset
                self.pool[table[position // self.block_size], position % self.block_size] = rows.token_ids[row]
                if row in wanted:
                    logits[row] = self.logits_after(self._read(table, position + 1))
        return np.array([logits[row] for row in rows.logit_rows.tolist()], np.float32).reshape(-1, self.vocab_size)

    def _read(self, table: np.ndarray, num_tokens: int) -> np.ndarray:
        positions = np.arange(num_tokens)
        tokens = self.pool[table[positions // self.block_size], positions % self.block_size]
        assert (tokens >= 0).all(), "a KV entry that was never written is read"
        return tokens

    def logits_after(self, tokens: np.ndarray) -> np.ndarray:
        """[V] logits: a part that depends on the last two tokens, and one on all within memory."""
        key = tokens.tobytes()
        if key not in self._known:
            self._known[key] = self._draw_logits(tokens)
        return self._known[key]

    def _draw_logits(self, tokens: np.ndarray) -> np.ndarray:
        near = np.random.default_rng([7, *tokens[-2:].tolist()]).normal(size=self.vocab_size)
        far = np.random.default_rng([11, *tokens[-self.memory :].tolist()]).normal(size=self.vocab_size)
        other = np.random.default_rng([13, *tokens[-2:].tolist()]).normal(size=self.vocab_size)
        return (4 * near + 0.7 * far + self.noise * other).astype(np.float32)


class CountingClock:
    """A virtual clock that advances by one microsecond a reading."""

    def __init__(self) -> None:
        self._now = 0

    def now_ns(self) -> int:
        self._now += 1000
        return self._now
