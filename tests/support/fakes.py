"""Fakes of the runner and lanes ports. A runner's answers depend on every KV entry that a real model would read.

`HashRunner` stores token ids in paged pools, one per segment. A row's logits are a pseudo-random function of the
last `memory` tokens before it, read back through the block table in every segment: a wrong block, a stale entry or
a missed truncation, however deep, changes the logits, and with them the tokens.
"""

import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from faser_backend.core.batch import RowBatch

# Logits by (vocabulary, memory, noise) and tokens, shared by all runners: many engines decode the same requests.
_KNOWN: dict[tuple[int, int, float], dict[bytes, np.ndarray]] = {}


class HashRunner:
    """A runner with hashed logits. memory: number of trailing tokens that logits depend on. noise: deviation from the
    shared model.

    exit_noise: deviation of exit scores from the final logits. pools: of a runner that shares its K/V, as two
    partitions do. `fails_at_call` (from 1) makes a call raise.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        memory: int = 10**6,
        noise: float = 0.0,
        num_layers: tuple[int, ...] = (1,),
        exit_noise: float = 1.0,
        pools: list[np.ndarray] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_logit_rows: int | None = None
        self.max_mixed_rows: int | None = None
        self.memory = memory
        self.noise = noise
        self.exit_noise = exit_noise
        self.block_size = block_size
        self.num_layers = num_layers
        self.num_segments = len(num_layers)
        self.exits = frozenset(range(self.num_segments - 1))
        self.pools = pools or [np.full((num_blocks, block_size), -1, np.int64) for _ in num_layers]
        self.num_calls = 0
        self.num_row_layers = 0
        self.fails_at_call: int | None = None
        self.known = _KNOWN.setdefault((vocab_size, memory, noise), {})
        self._is_running = threading.Lock()
        self._shared: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        output, _ = self._run(segment, rows, hidden)
        return output

    def run_segment_with_scores(
        self, segment: int, rows: RowBatch, hidden: np.ndarray | None, exit_candidates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        assert segment in self.exits
        assert exit_candidates.shape[0] == rows.num_rows
        assert exit_candidates.min() >= 0 and exit_candidates.max() < self.vocab_size
        output, prefixes = self._run(segment, rows, hidden)
        scores = np.empty(exit_candidates.shape, np.float32)
        for row, tokens in enumerate(prefixes):
            noise = _exit_noise(segment, _digest(tokens), self.vocab_size)
            noisy = self.logits_after(tokens) + self.exit_noise * noise
            scores[row] = noisy[exit_candidates[row]]
        return output, scores

    def take_rows(self, hidden: np.ndarray, kept: np.ndarray) -> np.ndarray:
        return hidden[kept]

    def _run(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the segment's hidden states, and the tokens that each row sees in the segment's pool."""
        assert self._is_running.acquire(blocking=False), "the runner is entered while it runs"
        try:
            self._count_call(rows, segment)
            if segment == 0:
                assert hidden is None
                hidden = np.stack([rows.token_ids, np.zeros(rows.num_rows, np.int64)], axis=1)
            assert hidden is not None and hidden.shape == (rows.num_rows, 2), "one hidden state per row"
            assert (hidden[:, 0] == rows.token_ids).all(), "hidden states of other rows"
            prefixes = self._write_and_read(segment, rows)
            # A state is the digest of the tokens that this row saw in all segments, if they agree.
            digests = np.array([_digest(tokens) for tokens in prefixes], np.int64)
            agrees = (hidden[:, 1] == digests) | (segment == 0)
            states = np.where(agrees, digests, hidden[:, 1] * 31 + digests)
            if segment < self.num_segments - 1:
                return self._share(segment, np.stack([rows.token_ids, states], axis=1)), prefixes
            wanted = rows.logit_rows.tolist()
            logits = [self.logits_after(prefixes[r]) if agrees[r] else self._garbage(int(states[r])) for r in wanted]
            return self._share(segment, np.array(logits, np.float32).reshape(-1, self.vocab_size)), prefixes
        finally:
            self._is_running.release()

    def _share(self, segment: int, output: np.ndarray) -> np.ndarray:
        """Returns the array, valid until the next call of this shape, which spoils it."""
        old = self._shared.get((segment, output.shape))
        if old is not None:
            old.fill(-1 if old.dtype == np.int64 else np.nan)
        self._shared[segment, output.shape] = output
        return output

    def _count_call(self, rows: RowBatch, segment: int) -> None:
        assert rows.token_ids.min() >= 0 and rows.token_ids.max() < self.vocab_size
        self.num_calls += 1
        self.num_row_layers += rows.num_rows * self.num_layers[segment]
        if self.num_calls == self.fails_at_call:
            raise RuntimeError("the fake was told to fail")

    def _write_and_read(self, segment: int, rows: RowBatch) -> list[np.ndarray]:
        pool, prefixes, starts, bounds = self.pools[segment], [], rows.context_lens.tolist(), rows.cu_rows.tolist()
        for table, start, begin, end in zip(rows.block_tables, starts, bounds, bounds[1:], strict=False):
            positions = np.arange(start + end - begin)
            blocks, offsets = table[positions // self.block_size], positions % self.block_size
            pool[blocks[start:], offsets[start:]] = rows.token_ids[begin:end]
            tokens = pool[blocks, offsets]
            assert tokens.min(initial=0) >= 0, "a KV entry that was never written is read"
            prefixes += [tokens[:length] for length in range(start + 1, tokens.size + 1)]
        return prefixes

    def logits_after(self, tokens: np.ndarray) -> np.ndarray:
        """Returns logits [V]: one part depends on the last two tokens, another on all within memory."""
        key = tokens.tobytes()
        if key not in self.known:
            self.known[key] = self._draw_logits(tokens)
        return self.known[key]

    def _draw_logits(self, tokens: np.ndarray) -> np.ndarray:
        near = np.random.default_rng([7, *tokens[-2:].tolist()]).normal(size=self.vocab_size)
        far = np.random.default_rng([11, *tokens[-self.memory :].tolist()]).normal(size=self.vocab_size)
        other = np.random.default_rng([13, *tokens[-2:].tolist()]).normal(size=self.vocab_size)
        return (4 * near + 0.7 * far + self.noise * other).astype(np.float32)

    def _garbage(self, state: int) -> np.ndarray:
        """Returns logits [V] of a row whose segments saw different tokens."""
        return 10 * np.random.default_rng([19, state & 0xFFFFFFFF]).normal(size=self.vocab_size)


def _digest(tokens: np.ndarray) -> int:
    return zlib.crc32(tokens.tobytes())


@cache
def _exit_noise(segment: int, digest: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng([17, segment, digest]).normal(size=vocab_size)


class SequentialLanes:
    """Both phases one after the other in a fixed order, for reproducible tests."""

    def __init__(self, *, verifies_first: bool) -> None:
        self._verifies_first = verifies_first

    def run_both(self, verify: Callable[[], Any], propose: Callable[[], Any]) -> tuple[Any, Any]:
        if self._verifies_first:
            verified, error = _caught(verify)
            proposed, late = _caught(propose)
        else:
            proposed, error = _caught(propose)
            verified, late = _caught(verify)
        if error or late:
            raise error or late  # type: ignore[misc]
        return verified, proposed


class ThreadLanes:
    """Both phases at once, each on its own thread."""

    def __init__(self) -> None:
        self._pools = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]

    def run_both(self, verify: Callable[[], Any], propose: Callable[[], Any]) -> tuple[Any, Any]:
        running = [pool.submit(phase) for pool, phase in zip(self._pools, (verify, propose), strict=True)]
        errors = [future.exception() for future in running]
        for error in errors:
            if error is not None:
                raise error
        return running[0].result(), running[1].result()


def _caught(phase: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return phase(), None
    except Exception as error:  # raised by the caller after both have ended
        return None, error


class CountingClock:
    """A virtual clock that advances by one microsecond a reading."""

    def __init__(self) -> None:
        self._now = 0

    def now_ns(self) -> int:
        self._now += 1000
        return self._now
