"""Buffers and bindings of one call shape, and a small cache of them.

A shape is filled in place: what is fixed by the shape is computed once, what changes (token ids,
positions, block table, slots of the new keys and values) is written over the last call's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from faser_backend.core.batch import RowBatch
from faser_backend.device.kv_pool import KvPool
from faser_backend.manifest import ModelSpec, SegmentSpec

MAX_SHAPES = 128
MAX_CACHED_BYTES = 256 << 20


class ShapeKey(NamedTuple):
    """What fixes the shape of every input and output."""

    num_rows: int  # T
    num_sequences: int  # B
    max_rows: int  # Q; T = B * Q exactly where all sequences have as many rows
    num_blocks: int  # MB
    num_logit_rows: int  # R
    num_candidates: int  # K


def bucketed_blocks(num_blocks: int) -> int:
    """The block table width to use: rounded up by at most a quarter, so that few shapes occur."""
    step = 1 << max(num_blocks.bit_length() - 3, 0)
    return -(-num_blocks // step) * step


class CallShape:
    """One bound call. `result` and `exit_scores` are overwritten by the next run of the shape."""

    def __init__(
        self, session: ort.InferenceSession, segment: SegmentSpec, spec: ModelSpec, pool: KvPool, key: ShapeKey
    ):
        rows, sequences, queries, blocks = key.num_rows, key.num_sequences, key.max_rows, key.num_blocks
        self.is_uniform = rows == sequences * queries
        self._block_size = pool.kv_block_size
        self._max_rows = queries
        self.token_ids = np.zeros(rows, np.int64)
        self.positions = np.zeros(rows, np.int64)
        self.pad_idx = np.arange(sequences * queries, dtype=np.int64).reshape(sequences, queries)
        self.unpad_idx = np.arange(rows, dtype=np.int64)
        self.block_table = np.zeros((sequences, blocks), np.int64)
        self.columns = np.arange(blocks * pool.kv_block_size, dtype=np.int64)
        self.kv_slots = np.zeros((rows, spec.num_kv_heads, 1, 3), np.int64)
        self.kv_slots[..., 0] = np.arange(spec.num_kv_heads)[:, None]
        self.logit_rows = np.zeros(key.num_logit_rows, np.int64)
        self.exit_candidates = np.zeros((rows, key.num_candidates), np.int64)
        self.hidden = np.zeros((rows, spec.hidden_size), np.float32)
        is_last = segment.last_layer == spec.num_layers
        self.result = np.zeros(
            (key.num_logit_rows, spec.vocab_size) if is_last else (rows, spec.hidden_size), np.float32
        )
        self.exit_scores = np.zeros((rows, key.num_candidates), np.float32) if segment.has_exit_scores else None
        self._row_sequence = np.repeat(np.arange(sequences), queries)[:rows]
        self._first_row_offsets = np.arange(queries)
        self._session = session
        self._binding = session.io_binding()
        self._bind(segment, pool)

    @property
    def num_bytes(self) -> int:
        return self.result.nbytes + self.hidden.nbytes + self.kv_slots.nbytes + self.block_table.nbytes

    def _bind(self, segment: SegmentSpec, pool: KvPool) -> None:
        pools = {}
        for layer in range(segment.first_layer, segment.last_layer):
            for name, view in (("k", pool.keys(layer)), ("v", pool.values(layer))):
                pools[f"{name}_pool.{layer}"] = pools[f"{name}_pool_out.{layer}"] = _ort_value(view)
        for tensor in segment.inputs:
            value = pools.get(tensor.name) or _ort_value(getattr(self, tensor.name))
            self._binding.bind_ortvalue_input(tensor.name, value)
        results = {"logits": self.result, "hidden_out": self.result, "exit_scores": self.exit_scores}
        for tensor in segment.outputs:
            value = pools.get(tensor.name) or _ort_value(results[tensor.name])
            self._binding.bind_ortvalue_output(tensor.name, value)

    def fill(
        self, rows: RowBatch, counts: np.ndarray, hidden: np.ndarray | None, candidates: np.ndarray | None
    ) -> None:
        """Writes a batch of this shape into the bound buffers. counts [B] = rows per sequence."""
        if hidden is None:
            self.token_ids[:] = rows.token_ids
        else:
            self.hidden[:] = hidden
        if candidates is not None:
            self.exit_candidates[:] = candidates
        self.logit_rows[:] = rows.logit_rows
        width = min(rows.block_tables.shape[1], self.block_table.shape[1])
        self.block_table[:, :width] = rows.block_tables[:, :width]
        if self.is_uniform:
            np.add(rows.context_lens[:, None], self._first_row_offsets, out=self.positions.reshape(self.pad_idx.shape))
            sequence = self._row_sequence
        else:
            sequence = self._fill_ragged(rows, counts)
        block, offset = np.divmod(self.positions, self._block_size)
        self.kv_slots[:, :, 0, 1] = self.block_table[sequence, block][:, None]
        self.kv_slots[:, :, 0, 2] = offset[:, None]

    def _fill_ragged(self, rows: RowBatch, counts: np.ndarray) -> np.ndarray:
        """Positions and padding where sequences differ in rows. Returns the sequence of each row, [T]."""
        starts = rows.cu_rows[:-1]
        sequence = np.repeat(np.arange(counts.shape[0]), counts)
        offset_in_sequence = np.arange(sequence.shape[0]) - starts[sequence]
        np.add(rows.context_lens[sequence], offset_in_sequence, out=self.positions)
        np.add(sequence * self._max_rows, offset_in_sequence, out=self.unpad_idx)
        np.minimum(starts[:, None] + self._first_row_offsets, rows.cu_rows[1:, None] - 1, out=self.pad_idx)
        return sequence

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)


class ShapeCache:
    """The most recently used call shapes of one segment, bounded in number and bytes."""

    def __init__(self, session: ort.InferenceSession, segment: SegmentSpec, spec: ModelSpec, pool: KvPool) -> None:
        self._session, self._segment, self._spec, self._pool = session, segment, spec, pool
        self._shapes: OrderedDict[ShapeKey, CallShape] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._shapes)

    def get(self, key: ShapeKey) -> CallShape:
        shape = self._shapes.get(key)
        if shape is not None:
            self._shapes.move_to_end(key)
            return shape
        shape = CallShape(self._session, self._segment, self._spec, self._pool, key)
        self._shapes[key] = shape
        self._num_bytes += shape.num_bytes
        while len(self._shapes) > MAX_SHAPES or (self._num_bytes > MAX_CACHED_BYTES and len(self._shapes) > 1):
            _, evicted = self._shapes.popitem(last=False)
            self._num_bytes -= evicted.num_bytes
        return shape


def _ort_value(array: np.ndarray) -> ort.OrtValue:
    """A tensor over the array's own memory; the array must be contiguous and outlive it."""
    assert array.flags.c_contiguous
    return ort.OrtValue.ortvalue_from_numpy(array)
