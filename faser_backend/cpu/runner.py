"""`LlvmRunner` runs a model by the CPU's kernels over a KV pool; draft_runners.py has those of drafts that read it.

It implements core.ports.ModelRunner and core.adapter.AdaptableRunner. A call runs one compiled function
(cpu/kernels/segment.py) on each of its threads, which share the work; between calls the helper threads sleep. The
weight file is mapped and read in place. The target's runner writes the hidden states that a head reads to its pool, by
block and offset like keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np

from faser_backend.core.adapter import AdapterMatrices
from faser_backend.core.batch import RowBatch
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import EAGLE3, TWO_PARTS, ModelSpec, rotary_tables
from faser_backend.cpu.kernels import attention
from faser_backend.cpu.kernels.adapters import StoredAdapter, adapter_arguments
from faser_backend.cpu.kernels.attention import COLUMNS, space_size, tile_rows
from faser_backend.cpu.kernels.compilation import Kernel
from faser_backend.cpu.kernels.products import packed_size, scratch_size
from faser_backend.cpu.kernels.segment import DENSE, EAGLE3_HEAD, EXPERTS, SHARED_ROWS, segment_kernel
from faser_backend.cpu.kernels.threads import barrier_state
from faser_backend.cpu.kv_pool import KvPool, aligned_zeros
from faser_backend.cpu.weights import open_weights, segment_tables, useful_threads
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import ModelEngine

PAIRS_TO_READ = 5  # pairs (row, query head) whose arithmetic takes as long as reading keys and values
MOST_SHAPES = 256  # of calls, whose buffers are known
_NO_CANDIDATES = np.zeros((0, 0), np.int64)


class CallResults(NamedTuple):
    """The results of a segment's call, in buffers that its next call overwrites."""

    hidden: np.ndarray  # [T, hidden_size]; after the last layer, the logit rows in the first R rows
    logits: np.ndarray  # [R, num_logits], of the last segment
    exit_scores: np.ndarray  # [T, C], undefined without candidates


class CallBuffers(NamedTuple):
    """Buffers of a call of some shape: results (hidden, logits, exit scores, features), the threads' common work space,
    and each thread's own."""

    results: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    shared: tuple[np.ndarray, ...]
    own: list[tuple]


class Workspace:
    """Float buffers by name, which grow to what the largest call needs. on_growth: called when one is replaced."""

    def __init__(self, on_growth: Callable[[], None]) -> None:
        self._buffers: dict[str, np.ndarray] = {}
        self._on_growth = on_growth

    def view(self, name: str, *shape: int) -> np.ndarray:
        """Returns the start of the buffer of this name as an array of this shape."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            capacity = size if buffer is None else max(size, 2 * buffer.size)
            buffer = self._buffers[name] = aligned_zeros((capacity,), np.float32)
            self._on_growth()
        return buffer[:size].reshape(shape)


class Helper:
    """A thread that runs kernels; its queues hand over work faster than a thread pool's futures."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Kernel, tuple] | None] = SimpleQueue()
        self._errors: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: Thread | None = None

    def open(self) -> None:
        """Starts the thread on the caller's cores, unless it runs."""
        if self._thread is None:
            thread = Thread(target=self._serve, name="kernels", daemon=True)
            thread.start()
            self._thread = thread

    def start(self, kernel: Kernel, arguments: tuple) -> None:
        self._work.put((kernel, arguments))

    def wait(self) -> BaseException | None:
        """Waits for the kernel and returns the error that it raised, if any."""
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


class LlvmRunner:
    """Runs the segments of one model. Calls are serial; concurrent runners on one pool need different sequences."""

    def __init__(
        self,
        model: ModelEngine,
        engine_dir: Path,
        partition: CorePartition,
        pool: KvPool,
        owner: ModelEngine | None = None,
        *,
        num_threads: int | None = None,
        compute: str = TWO_PARTS,
    ) -> None:
        """owner: the target, which provides the embedding and the head that a draft does not have.

        num_threads: limits the cores used. compute: one of COMPUTES.
        Raises ConfigError for a pool that this CPU cannot read.
        """
        assert model.weights is not None, "an engine of this runtime has one weight file"
        spec = model.spec
        self.spec, self.partition = spec, partition
        most_threads = useful_threads(model, partition)
        self.num_threads = min(num_threads or most_threads, most_threads)
        self.pool = pool
        self.num_segments = len(model.segments)
        self.num_layers = tuple(segment.last_layer - segment.first_layer for segment in model.segments)
        self.exits = frozenset(index for index, segment in enumerate(model.segments) if segment.has_exit_scores)
        self.vocab_size = spec.vocab_size
        self.max_logit_rows: int | None = None
        self.max_mixed_rows: int | None = None
        self._weights = open_weights(engine_dir / model.weights.name)
        self._embedding_file = self._head_file = self._weights
        layers_format, embedding_format, head_format = model.weight_format.formats
        if owner is not None:
            assert owner.weights is not None, "an engine of this runtime has one weight file"
            of_owner, formats = open_weights(engine_dir / owner.weights.name), owner.weight_format.formats
            if "embedding" not in self._weights:
                self._embedding_file, embedding_format = of_owner, formats[1]
            if "lm_head" not in self._weights:
                self._head_file, head_format = of_owner, formats[2]
        self._segments = [segment_tables(spec, segment, self._weights) for segment in model.segments]
        head = self._head_file.offset("lm_head" if "lm_head" in self._head_file else "embedding")
        self._end_matrices = np.array([self._embedding_file.offset("embedding"), head], np.int64)
        self._last_norm = self._weights.tensor("norm").copy()  # kernels take writable arrays
        self._cos, self._sin = rotary_tables(spec)
        self._eps, self._scale = np.float32(spec.rms_eps), np.float32(spec.head_dim**-0.5)
        kind = EAGLE3_HEAD if spec.family == EAGLE3 else EXPERTS if spec.num_experts else DENSE
        self._formats = layers_format, embedding_format, head_format
        self._kernel = segment_kernel(spec.head_dim, readable_dtype(pool), self._formats, compute, kind)
        self._most_inputs = max(spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim)
        self._num_logits = spec.vocab_size  # of a row
        bits = np.uint16 if self.pool.storage.dtype == np.float16 else np.float32
        self._storage = self.pool.storage.view(bits)
        self._buffers: dict[tuple, CallBuffers] = {}  # by shape: a call needs some 25 views
        self._workspace = Workspace(self._buffers.clear)
        self._own = [Workspace(self._buffers.clear) for _ in range(self.num_threads)]
        self._helpers = [Helper() for _ in range(self.num_threads - 1)]
        self._barrier = barrier_state()
        self._open(owner, compute)

    def _open(self, target: ModelEngine | None, compute: str) -> None:
        """Opens what a draft that reads its target has beside a decoder."""

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        """See core.ports.ModelRunner. The segment's next call overwrites the result."""
        results = self._run(segment, rows, hidden, None)
        return results.logits if segment == self.num_segments - 1 else results.hidden

    def run_segment_with_scores(
        self, segment: int, rows: RowBatch, hidden: np.ndarray | None, exit_candidates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        assert self._segments[segment].spec.has_exit_scores, f"segment {segment} has no exit scores"
        results = self._run(segment, rows, hidden, exit_candidates)
        return results.hidden, results.exit_scores

    def take_rows(self, hidden: np.ndarray, kept: np.ndarray) -> np.ndarray:
        return hidden[kept]

    def store_adapter(self, matrices: AdapterMatrices) -> StoredAdapter:
        return StoredAdapter(matrices, self.spec.num_layers)

    def close(self) -> None:
        """Ends the helper threads; the runner cannot be used afterwards. May be called again."""
        for helper in self._helpers:
            helper.close()
        self._helpers.clear()

    def _run(
        self, segment: int, rows: RowBatch, hidden: np.ndarray | None, candidates: np.ndarray | None
    ) -> CallResults:
        tables, counts = self._segments[segment], rows.rows_per_sequence
        last_tokens = rows.context_lens + counts
        check_blocks(self.pool, rows.block_tables, int(last_tokens.max()))
        asked = _NO_CANDIDATES if candidates is None else np.ascontiguousarray(candidates)
        shape = segment, rows.num_rows, rows.logit_rows.size, asked.shape
        buffers = self._buffers.get(shape)
        if buffers is None:
            if len(self._buffers) >= MOST_SHAPES:
                self._buffers.clear()
            buffers = self._buffers[shape] = self._buffers_of(*shape)
        state, logits, scores, features = buffers.results
        if hidden is not None:
            state[:] = hidden
        integers = (rows.token_ids, rows.positions, rows.cu_rows, rows.context_lens, rows.block_tables, rows.logit_rows)
        shared = (*map(np.ascontiguousarray, integers), asked, *buffers.results, *buffers.shared)
        constants = (
            self._storage, self._weights.data, self._embedding_file.data, self._head_file.data, tables.matrices,
            self._end_matrices, tables.vectors, tables.vector_offsets, self._last_norm, self._cos, self._sin,
            attention_items(self.spec, counts, rows), tables.sizes, *adapter_arguments(rows, self._workspace.view),
            self._eps, self._scale, candidates is not None,
        )  # fmt: skip
        calls = [
            (thread, self.num_threads, self._barrier, *shared, *own, *constants)
            for thread, own in enumerate(buffers.own)
        ]
        self._on_all_threads(self._kernel, calls)
        if tables.feature_layers:
            blocks, offsets = blocks_and_offsets(rows, self.pool.kv_block_size)
            for layer, of_layer in zip(tables.feature_layers, features, strict=True):
                self.pool.features[layer][blocks, offsets] = of_layer
        return CallResults(state, logits, scores)

    def _buffers_of(self, segment: int, num_rows: int, num_logits: int, scores_shape: tuple[int, ...]) -> CallBuffers:
        spec, tables, view = self.spec, self._segments[segment], self._workspace.view
        is_last = tables.spec.last_layer == spec.num_layers
        results = (
            view(f"hidden.{segment}", num_rows, spec.hidden_size),
            view("logits", num_logits if is_last else 0, self._num_logits),
            view("exit_scores", *scores_shape),
            view("features", len(tables.feature_layers), num_rows, spec.hidden_size),
        )
        num_assignments = num_rows * max(spec.num_experts_per_token, 1)
        shared = (
            view("q", num_rows, spec.num_heads, spec.head_dim),
            view("k", num_rows, spec.num_kv_heads, spec.head_dim),
            view("v", num_rows, spec.num_kv_heads, spec.head_dim),
            view("attended", num_rows, spec.num_heads, spec.head_dim),
            view("gate", num_assignments, spec.intermediate_size),
            view("up", num_assignments, spec.intermediate_size),
            view("gathered", num_logits, spec.num_heads * spec.head_dim),
        )
        own = [self._own_space(thread, num_rows) for thread in range(self.num_threads)]
        return CallBuffers(results, shared, own)

    def _own_space(self, thread: int, num_rows: int) -> tuple:
        """Returns the arguments from `normed` to `extras`; with many rows, the threads share the first two."""
        spec, view, view_rows = self.spec, self._own[thread].view, self._view_of_rows(thread, num_rows)
        return (
            view_rows("normed", num_rows, spec.hidden_size),
            view_rows("packed", packed_size(self._most_inputs, num_rows)),
            self._strip(thread),
            view("space", space_size(spec.head_dim, spec.num_heads // spec.num_kv_heads)),
            view("pool_rows", 2 * COLUMNS).view(np.int32),
            self._extras(thread, num_rows),
        )

    def _view_of_rows(self, thread: int, num_rows: int) -> Callable[..., np.ndarray]:
        """Returns `view` of the threads' workspace if they share the call's norms, or of the thread's own."""
        return self._workspace.view if num_rows > SHARED_ROWS else self._own[thread].view

    def _strip(self, thread: int) -> np.ndarray:
        return self._own[thread].view("strip", scratch_size(self._most_inputs))

    def _extras(self, thread: int, num_rows: int) -> tuple[np.ndarray, ...]:
        """Returns the extra arguments of the model's kind of kernel: see EXTRAS in cpu/kernels/segment.py."""
        spec = self.spec
        if not spec.num_experts:
            return ()
        view, own, num_chosen = self._workspace.view, self._own[thread].view, spec.num_experts_per_token
        return (
            view("probs", num_rows, spec.num_experts),
            view("shares", num_rows, num_chosen),
            view("chosen", num_rows, num_chosen).view(np.int32),
            view("outputs", num_rows * num_chosen, spec.hidden_size),
            own("taken", num_rows, spec.hidden_size),
            own("packed_of_expert", packed_size(self._most_inputs, num_rows)),
            own("ends", spec.num_experts).view(np.int32),
            own("order", num_rows, num_chosen).view(np.int32),
            own("rows", num_rows * num_chosen).view(np.int32),
        )

    def _on_all_threads(self, kernel: Kernel, calls: list[tuple]) -> None:
        """Calls the kernel once per call, the first time on this thread; returns or raises when all have ended."""
        for helper in self._helpers[: len(calls) - 1]:
            helper.open()  # all, before one of them waits for the others at a barrier
        for helper, call in zip(self._helpers, calls[1:], strict=False):
            helper.start(kernel, call)
        try:
            kernel(*calls[0])
        finally:
            errors = [helper.wait() for helper in self._helpers[: len(calls) - 1]]
        for error in errors:
            if error is not None:
                raise error


def attention_items(spec: ModelSpec, counts: np.ndarray, rows: RowBatch) -> np.ndarray:
    """Returns the items of attention (see cpu/kernels/attention.py), [N, 4] int64, those that take longest first.

    counts [B]: rows of the sequences. An item's time is counted in pairs (row, query head) times columns.
    """
    heads_per_kv = spec.num_heads // spec.num_kv_heads
    most_rows = tile_rows(heads_per_kv)
    if counts.size == 1 and counts[0] <= most_rows:
        return _items_of_one(int(counts[0]), spec.num_kv_heads)
    tiles = np.maximum(-(-counts // most_rows), 1)  # one also without rows: more items mean that rows are shared
    sequences = np.arange(counts.size).repeat(tiles)
    first = (np.arange(sequences.size) - (tiles.cumsum() - tiles)[sequences]) * most_rows
    num_rows = np.minimum(counts[sequences] - first, most_rows)
    times = (num_rows * heads_per_kv + PAIRS_TO_READ) * (rows.context_lens[sequences] + first + num_rows)
    order = (-times).argsort(kind="stable").repeat(spec.num_kv_heads)
    kv_heads = np.arange(order.size) % spec.num_kv_heads
    columns = (sequences[order], kv_heads, (rows.cu_rows[sequences] + first)[order], num_rows[order])
    return np.array(columns, np.int64).T.copy()


@lru_cache(256)
def _items_of_one(num_rows: int, num_kv_heads: int) -> np.ndarray:
    """Returns the items of one sequence with a tile of rows."""
    return np.array([(0, kv_head, 0, num_rows) for kv_head in range(num_kv_heads)])


def check_blocks(pool: KvPool, block_tables: np.ndarray, num_tokens: int) -> None:
    """Checks what kernels do not check. Raises IndexError before anything is read or written."""
    num_blocks, size = pool.num_blocks, pool.kv_block_size
    least, most = int(block_tables.min()), int(block_tables.max())
    if least < 0 or most >= num_blocks:
        raise IndexError(f"block_tables = {least} to {most}: blocks of the pool are 0 to {num_blocks - 1}")
    if num_tokens > block_tables.shape[1] * size:
        raise IndexError(f"block_tables: {num_tokens} tokens need more than {block_tables.shape[1]} blocks of {size}")


def readable_dtype(pool: KvPool) -> str:
    """Returns the pool's dtype as kernels name it. Raises ConfigError if this CPU has no instructions for it."""
    if pool.storage.dtype != np.float16:
        return "fp32"
    if not attention.has_halves():
        raise ConfigError(
            "kv_cache_dtype = fp16: this CPU cannot convert halves; build the engine with --kv-cache-dtype fp32"
        )
    return "fp16"


def blocks_and_offsets(rows: RowBatch, kv_block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each row's block and its offset in it, [T] both."""
    counts = rows.rows_per_sequence
    blocks, offsets = np.divmod(rows.positions, kv_block_size)
    return rows.block_tables[np.arange(counts.size).repeat(counts), blocks], offsets
