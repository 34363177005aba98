"""`HostAttention`: the attention of a model's layers on some of this machine's cores.

Spreads the kernel's work (plugins/host_attention.py), which is a unit per sequence and KV head, over threads.
Knows pools and rows; nothing of graphs.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import ModelSpec
from faser_backend.device.kv_pool import KvPool

if TYPE_CHECKING:
    from plugins.host_attention import Kernel

# Numbers of keys and values that a thread should have to read: waking it takes 50 us, and they about as long.
FEWEST_NUMBERS_PER_THREAD = 1 << 19
ROWS_TO_READ = 5  # rows whose arithmetic takes as long as it takes to read what they attend to


class _Work(NamedTuple):
    """What a call's layers have in common. bounds: units of each thread lie between two neighbours."""

    block_table: np.ndarray
    cu_rows: np.ndarray
    context_lens: np.ndarray
    bounds: list[int]


class HostAttention:
    """Not thread-safe: the layers of one call after the other. Threads start on the cores of who first calls."""

    def __init__(self, spec: ModelSpec, pool: KvPool, num_threads: int) -> None:
        """Raises ConfigError where this CPU has no instructions for the pool's dtype."""
        self._spec = spec
        self._pool = pool
        self._num_threads = num_threads
        from plugins import host_attention  # not above: it loads numba, which other runtimes do without

        has_halves = pool.storage.dtype == np.float16
        if has_halves and not host_attention.has_halves():
            raise ConfigError(
                "kv_cache_dtype = fp16: this CPU cannot convert halves; build the engine with --kv-cache-dtype fp32"
            )
        self._kernel = host_attention.attention_kernel(spec.head_dim, "fp16" if has_halves else "fp32")
        bits = np.uint16 if has_halves else np.float32
        layers = range(spec.num_layers)
        self._layers = [(pool.keys(layer).view(bits), pool.values(layer).view(bits)) for layer in layers]
        self._tile_rows, self._scratch_width = host_attention.TILE_ROWS, host_attention.scratch_width
        self._scale = np.float32(spec.head_dim**-0.5)
        self._helpers = [Helper() for _ in range(num_threads - 1)]
        self._scratch = [self._make_scratch(0) for _ in range(num_threads)]
        self._work: _Work | None = None

    def begin(self, rows: RowBatch, counts: np.ndarray) -> None:
        """Shares out a call: counts [B] = rows of each sequence."""
        last_tokens = rows.context_lens + counts
        numbers = numbers_read(self._spec, counts, last_tokens)
        num_threads = min(self._num_threads, int(numbers.sum() / FEWEST_NUMBERS_PER_THREAD))
        bounds = unit_bounds(self._spec, numbers, max(num_threads, 1))
        check_blocks(self._pool, rows.block_tables, int(last_tokens.max()))
        width = self._scratch_width(-(-int(last_tokens.max()) // self._pool.kv_block_size) * self._pool.kv_block_size)
        if self._scratch[0][0].shape[1] < width:
            width = max(width, 2 * self._scratch[0][0].shape[1])
            self._scratch = [self._make_scratch(width) for _ in self._scratch]
        tables, cu_rows, context_lens = map(np.ascontiguousarray, (rows.block_tables, rows.cu_rows, rows.context_lens))
        self._work = _Work(tables, cu_rows, context_lens, bounds)

    def _make_scratch(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Work space of a thread: scores, and a block's keys or values as float32."""
        widened = np.empty((self._pool.kv_block_size, self._spec.head_dim), np.float32)
        return np.empty((self._tile_rows, width), np.float32), widened

    def run(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, *, attends: bool) -> None:
        """Writes k and v [T, Hkv, 1, head_dim] to the layer's pool, and what q [T, H, 1, head_dim] attends to, to out.

        attends: False where nobody wants `out` [T, H * head_dim], which is then left as it is.
        """
        work, spec = self._work, self._spec
        assert work is not None, "begin() shares out a call first"
        num_rows = q.shape[0]
        arrays = (
            q.reshape(num_rows, spec.num_heads, spec.head_dim),
            k.reshape(num_rows, spec.num_kv_heads, spec.head_dim),
            v.reshape(num_rows, spec.num_kv_heads, spec.head_dim),
            *self._layers[layer],
            work.block_table,
            work.cu_rows,
            work.context_lens,
            out.reshape(num_rows, spec.num_heads, spec.head_dim),
        )
        bounds = work.bounds
        shares = [
            (*arrays, *scratch, first, last, self._scale, attends)
            for scratch, first, last in zip(self._scratch, bounds, bounds[1:], strict=False)
        ]
        helpers = self._helpers[: len(shares) - 1]
        for helper, share in zip(helpers, shares[1:], strict=True):
            helper.start(self._kernel, share)
        try:
            self._kernel(*shares[0])
        finally:  # whatever happened here, nobody works on when this returns, and no error waits for the next call
            errors = [helper.wait() for helper in helpers]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Ends the threads."""
        for helper in self._helpers:
            helper.close()
        self._helpers.clear()


def numbers_read(spec: ModelSpec, counts: np.ndarray, last_tokens: np.ndarray) -> np.ndarray:
    """[B] keys and values that attention reads for each sequence, in numbers; arithmetic in what it could read
    meanwhile. counts [B] rows, last_tokens [B] tokens that the last row sees."""
    reads = (counts * (spec.num_heads // spec.num_kv_heads) + (ROWS_TO_READ - 1)) / ROWS_TO_READ
    return reads * last_tokens * (2 * spec.num_kv_heads * spec.head_dim)


def unit_bounds(spec: ModelSpec, numbers: np.ndarray, num_threads: int) -> list[int]:
    """Units of attention (one KV head of one sequence) of each thread: between two neighbours of num_threads + 1."""
    bounds = [0, numbers.size * spec.num_kv_heads]
    if num_threads > 1:
        before = np.concatenate([[0], np.cumsum(numbers)])
        goals = before[-1] * np.arange(1, num_threads) / num_threads
        units = np.interp(goals, before, np.arange(numbers.size + 1) * spec.num_kv_heads)
        bounds[1:1] = np.rint(units).astype(np.int64).tolist()
    return bounds


def check_blocks(pool: KvPool, block_tables: np.ndarray, num_tokens: int) -> None:
    """Kernels trust their indices. Raises IndexError before anything is read or written."""
    num_blocks, size = pool.num_blocks, pool.kv_block_size
    least, most = int(block_tables.min()), int(block_tables.max())
    if least < 0 or most >= num_blocks:
        raise IndexError(f"block_tables = {least} to {most}: blocks of the pool are 0 to {num_blocks - 1}")
    if num_tokens > block_tables.shape[1] * size:
        raise IndexError(f"block_tables: {num_tokens} tokens need more than {block_tables.shape[1]} blocks of {size}")


class Helper:
    """A thread that runs kernels. Queues hand over in a fraction of what a thread pool's futures take."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Kernel, tuple] | None] = SimpleQueue()
        self._errors: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: Thread | None = None

    def start(self, kernel: Kernel, arguments: tuple) -> None:
        """The first time, starts the thread on the cores of the caller's."""
        if self._thread is None:
            self._thread = Thread(target=self._serve, name="attention", daemon=True)
            self._thread.start()
        self._work.put((kernel, arguments))

    def wait(self) -> BaseException | None:
        """Until what was started has ended. Returns what it raised."""
        return self._errors.get()

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            kernel, arguments = work
            try:
                kernel(*arguments)
            except BaseException as error:
                self._errors.put(error)
            else:
                self._errors.put(None)
