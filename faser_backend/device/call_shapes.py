"""Buffers of one call shape, and a small cache of them.

A shape is filled in place: what is fixed by the shape is computed once, what changes (token ids,
positions, block table, slots of the new keys and values) is written over the last call's. Every
numpy call here costs about a microsecond per model call: keep them few.

What is large (logits, hidden states) is shared by all shapes of a segment, and so is the binding: batches of
mixed lengths make a new shape in most steps, and fresh pages alone cost 0.2 to 2 ms for each.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from faser_backend.core.batch import RowBatch
from faser_backend.device.kv_pool import KvPool
from faser_backend.manifest import ModelSpec, SegmentSpec

MAX_SHAPES = 512
MAX_CACHED_BYTES = 64 << 20


class ShapeKey(NamedTuple):
    """What fixes the shape of every input and output."""

    num_rows: int  # T, rounded up where sequences differ in rows
    num_sequences: int  # B
    max_rows: int  # Q; T = B * Q exactly where all sequences have as many rows
    num_blocks: int  # MB
    num_logit_rows: int  # R, rounded up with T where every row has logits
    num_candidates: int  # K
    is_exact: bool = True  # no padding rows: nothing was rounded up


def bucketed_blocks(num_blocks: int) -> int:
    """The block table width to use: rounded up by at most a quarter, so that few shapes occur."""
    step = 1 << max(num_blocks.bit_length() - 3, 0)
    return -(-num_blocks // step) * step


def bucketed_rows(num_rows: int) -> int:
    """The rows of a ragged call: rounded up by at most an eighth, so that trimmed batches make few shapes.

    The first call of a shape costs about half a millisecond, padding rows a few percent of one.
    """
    step = 1 << max(num_rows.bit_length() - 4, 0)
    return -(-num_rows // step) * step


class Workspace:
    """Float buffers by name, each as large as the largest call needed. Shapes hold views; what is outgrown is theirs."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def view(self, name: str, num_rows: int, width: int) -> np.ndarray:
        """[num_rows, width] of the buffer of this name, whose rows are that wide or, where they vary, of any width."""
        size = num_rows * width
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            capacity = size if buffer is None else max(size, 2 * buffer.size)
            buffer = self._buffers[name] = np.zeros(capacity, np.float32)
        return buffer[:size].reshape(num_rows, width)


class BoundSegment:
    """An open segment and what all its calls share: the pools of its layers, large buffers and the binding."""

    def __init__(self, session: ort.InferenceSession, segment: SegmentSpec, spec: ModelSpec, pool: KvPool) -> None:
        self.session = session
        self.segment = segment
        self.spec = spec
        self.kv_block_size = pool.kv_block_size
        self.scratch_block = pool.scratch_block
        self.is_first = segment.first_layer == 0
        self.is_last = segment.last_layer == spec.num_layers
        self.takes_hidden = any(tensor.name == "hidden" for tensor in segment.inputs)
        self.features = {f"aux_hidden.{layer}": array for layer, array in pool.features.items()}
        self.workspace = Workspace()
        self._binding = session.io_binding()
        self._bound_shape: CallShape | None = None
        pools: set[str] = set()
        for layer in range(segment.first_layer, segment.last_layer):
            for name, view in (("k", pool.keys(layer)), ("v", pool.values(layer))):
                value = _ort_value(view)  # the pools' outputs are their inputs: rows are written in place
                self._binding.bind_ortvalue_input(f"{name}_pool.{layer}", value)
                self._binding.bind_ortvalue_output(f"{name}_pool_out.{layer}", value)
                pools |= {f"{name}_pool.{layer}", f"{name}_pool_out.{layer}"}
        self.input_names = [tensor.name for tensor in segment.inputs if tensor.name not in pools]
        self.output_names = [tensor.name for tensor in segment.outputs if tensor.name not in pools]

    def execute(self, shape: CallShape) -> None:
        """Runs the segment on the buffers of a shape."""
        if shape is not self._bound_shape:
            for name, value in shape.input_values:
                self._binding.bind_ortvalue_input(name, value)
            for name, value in shape.output_values:
                self._binding.bind_ortvalue_output(name, value)
            self._bound_shape = shape
        self.session.run_with_iobinding(self._binding)


class CallShape:
    """The buffers of one call. `result`, `exit_scores`, `next_hidden` are overwritten by the segment's next call."""

    def __init__(self, bound: BoundSegment, key: ShapeKey) -> None:
        rows, sequences, queries, spec = key.num_rows, key.num_sequences, key.max_rows, bound.spec
        view = bound.workspace.view
        self._bound = bound
        self._max_rows = queries
        self.token_ids = np.zeros(rows, np.int64)
        self.hidden = view("hidden", rows if bound.takes_hidden else 0, spec.hidden_size)
        self.positions = np.zeros(rows, np.int64)
        self.pad_idx = np.arange(sequences * queries, dtype=np.int64).reshape(sequences, queries)
        self.unpad_idx = np.arange(rows, dtype=np.int64)
        self.block_table = np.zeros((sequences, key.num_blocks), np.int64)
        self.columns = np.arange(key.num_blocks * bound.kv_block_size, dtype=np.int64)
        self.kv_slots = np.zeros((rows, spec.num_kv_heads, 1, 3), np.int64)
        self.kv_slots[..., 0] = np.arange(spec.num_kv_heads)[:, None]
        self.logit_rows = np.zeros(key.num_logit_rows, np.int64)
        self.exit_candidates = np.zeros((rows, key.num_candidates), np.int64)
        result_shape = (key.num_logit_rows, spec.vocab_size) if bound.is_last else (rows, spec.hidden_size)
        self.result = view("result", *result_shape)
        self.exit_scores = view("exit_scores", rows, key.num_candidates)
        own_rows = key.num_logit_rows if bound.is_first and bound.takes_hidden else 0  # of a draft head
        self.next_hidden = view("next_hidden", own_rows, spec.hidden_size)
        self.features = {
            name: view(name, rows, spec.hidden_size) for name in bound.output_names if name in bound.features
        }
        self._cell_offsets = np.arange(queries)
        self._slot_blocks, self._slot_offsets = self.kv_slots[:, :, 0, 1], self.kv_slots[:, :, 0, 2]
        is_uniform = rows == sequences * queries and key.is_exact
        self._position_cells = self.positions.reshape(sequences, queries) if is_uniform else None
        self._uniform_sequence = np.repeat(np.arange(sequences), queries)  # [T] where uniform
        self.is_last = bound.is_last
        hidden_out = self.next_hidden if bound.is_last else self.result
        outputs = {"logits": self.result, "hidden_out": hidden_out, "exit_scores": self.exit_scores, **self.features}
        self.input_values = [(name, _ort_value(getattr(self, name))) for name in bound.input_names]
        self.output_values = [(name, _ort_value(outputs[name])) for name in bound.output_names]

    @property
    def num_bytes(self) -> int:
        """Bytes of its own buffers that grow with rows times something."""
        return self.kv_slots.nbytes + self.block_table.nbytes + self.exit_candidates.nbytes

    def run(self, rows: RowBatch, counts: np.ndarray, hidden: np.ndarray | None, candidates: np.ndarray | None) -> None:
        """Fills the buffers and runs the segment. counts [B] = rows of each sequence."""
        self._fill(rows, counts, hidden, candidates)
        self.execute()

    def execute(self) -> None:
        """The part of a call that is ONNX Runtime's."""
        self._bound.execute(self)
        for name, rows in self.features.items():
            self._bound.features[name][self._slot_blocks[:, 0], self._slot_offsets[:, 0]] = rows

    def _fill(
        self, rows: RowBatch, counts: np.ndarray, hidden: np.ndarray | None, candidates: np.ndarray | None
    ) -> None:
        num_rows, num_logits = rows.token_ids.shape[0], rows.logit_rows.shape[0]
        if hidden is None or self._bound.is_first:
            self.token_ids[:num_rows] = rows.token_ids
        if hidden is not None:
            self.hidden[:num_rows] = hidden
        if candidates is not None:
            self.exit_candidates[:num_rows] = candidates
        self.logit_rows[:num_logits] = rows.logit_rows
        self.logit_rows[num_logits:] = num_rows - 1
        width = min(rows.block_tables.shape[1], self.block_table.shape[1])
        self.block_table[:, :width] = rows.block_tables[:, :width]
        if self._position_cells is not None:
            np.add(rows.context_lens[:, None], self._cell_offsets, out=self._position_cells)
            sequence = self._uniform_sequence
        else:
            sequence = self._fill_ragged(rows, counts)
        block, offset = np.divmod(self.positions[:num_rows], self._bound.kv_block_size)
        self._slot_blocks[:num_rows] = self.block_table[sequence, block][:, None]
        self._slot_blocks[num_rows:] = self._bound.scratch_block
        self._slot_offsets[:num_rows] = offset[:, None]

    def _fill_ragged(self, rows: RowBatch, counts: np.ndarray) -> np.ndarray:
        """Positions and padding where sequences differ in rows. Returns the sequence of each true row.

        Rows that pad the call repeat the last true one, but for the slot that they write to.
        """
        starts = rows.cu_rows[:-1]
        sequence = np.repeat(np.arange(counts.shape[0]), counts)
        offset_in_sequence = np.arange(sequence.shape[0]) - starts[sequence]
        num_rows = sequence.shape[0]
        np.add(rows.context_lens[sequence], offset_in_sequence, out=self.positions[:num_rows])
        np.add(sequence * self._max_rows, offset_in_sequence, out=self.unpad_idx[:num_rows])
        self.positions[num_rows:] = self.positions[num_rows - 1]
        self.unpad_idx[num_rows:] = self.unpad_idx[num_rows - 1]
        np.minimum(starts[:, None] + self._cell_offsets, rows.cu_rows[1:, None] - 1, out=self.pad_idx)
        return sequence


class ShapeCache:
    """The most recently used call shapes of one segment, bounded in number and bytes."""

    def __init__(self, bound: BoundSegment) -> None:
        self.bound = bound
        self._shapes: OrderedDict[ShapeKey, CallShape] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._shapes)

    def get(self, key: ShapeKey) -> CallShape:
        shape = self._shapes.get(key)
        if shape is not None:
            self._shapes.move_to_end(key)
            return shape
        shape = self._shapes[key] = CallShape(self.bound, key)
        self._num_bytes += shape.num_bytes
        while len(self._shapes) > MAX_SHAPES or (self._num_bytes > MAX_CACHED_BYTES and len(self._shapes) > 1):
            _, evicted = self._shapes.popitem(last=False)
            self._num_bytes -= evicted.num_bytes
        return shape


def _ort_value(array: np.ndarray) -> ort.OrtValue:
    """A tensor over the array's own memory; the array must be contiguous and outlive it."""
    assert array.flags.c_contiguous
    return ort.OrtValue.ortvalue_from_numpy(array)
