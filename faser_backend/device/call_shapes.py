"""Buffers and bindings of one call shape, and a small cache of them.

Graphs know rows alone: how these belong to sequences is attention's matter (device/host_attention.py), so a shape is
no more than the number of rows and of logit rows. What is large (logits, hidden states, keys) is shared by all shapes
of a segment: fresh pages alone would cost 0.2 to 2 ms for each new shape, and mixed lengths make one in many steps.
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


class ShapeKey(NamedTuple):
    """What fixes the shape of every input and output."""

    num_rows: int  # T
    num_logit_rows: int  # R
    num_candidates: int  # K


class Workspace:
    """Float buffers by name, as large as the largest call needed. Shapes hold views; what is outgrown is theirs."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def view(self, name: str, *shape: int) -> np.ndarray:
        """The first numbers of the buffer of this name, in this shape."""
        size = int(np.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            capacity = size if buffer is None else max(size, 2 * buffer.size)
            buffer = self._buffers[name] = np.zeros(capacity, np.float32)
        return buffer[:size].reshape(shape)


class BoundSegment:
    """An open segment, a session per part, and what all its calls share."""

    def __init__(
        self, sessions: list[ort.InferenceSession], segment: SegmentSpec, spec: ModelSpec, pool: KvPool
    ) -> None:
        self.sessions = sessions
        self.segment = segment
        self.spec = spec
        self.layers = range(segment.first_layer, segment.last_layer)
        self.is_first = segment.first_layer == 0
        self.is_last = segment.last_layer == spec.num_layers
        self.takes_hidden = any(tensor.name == "hidden" for tensor in segment.inputs)
        self.feature_names = [tensor.name for tensor in segment.outputs if tensor.name.startswith("aux_hidden.")]
        self.features = {f"aux_hidden.{layer}": array for layer, array in pool.features.items()}
        self.workspace = Workspace()


class CallShape:
    """The buffers of one call. `result`, `exit_scores`, `next_hidden` are overwritten by the segment's next call."""

    def __init__(self, bound: BoundSegment, key: ShapeKey) -> None:
        rows, logit_rows, candidates = key
        spec, view = bound.spec, bound.workspace.view
        width = spec.hidden_size
        self._bound = bound
        self.is_last = bound.is_last
        self.token_ids = np.zeros(rows, np.int64)
        self.positions = np.zeros(rows, np.int64)
        self.logit_rows = np.zeros(logit_rows, np.int64)
        self.exit_candidates = np.zeros((rows, candidates), np.int64)
        self.hidden = view("hidden", rows if bound.takes_hidden else 0, width)
        self.q = view("q", rows, spec.num_heads, 1, spec.head_dim)
        self.k, self.v = (view(name, rows, spec.num_kv_heads, 1, spec.head_dim) for name in "kv")
        self.attended = view("attended", rows, spec.num_heads * spec.head_dim)
        self.result = view("result", *((logit_rows, spec.vocab_size) if bound.is_last else (rows, width)))
        self.exit_scores = view("exit_scores", rows, candidates)
        own_rows = logit_rows if bound.is_first and bound.takes_hidden else 0  # of a draft head
        self.next_hidden = view("next_hidden", own_rows, width)
        self.features = {name: view(name, rows, width) for name in bound.feature_names}
        self._arrays = {
            "logits": self.result,
            "hidden_out": self.next_hidden if bound.is_last else self.result,
            **{f"carried.{parity}": view(f"carried.{parity}", rows, width) for parity in (0, 1)},
            **self.features,
        }
        self._values: dict[str, ort.OrtValue] = {}
        self.bindings = [self._bind(session) for session in bound.sessions]

    def _bind(self, session: ort.InferenceSession) -> ort.IOBinding:
        binding = session.io_binding()
        for tensor in session.get_inputs():
            binding.bind_ortvalue_input(tensor.name, self._value(tensor.name))
        for tensor in session.get_outputs():
            binding.bind_ortvalue_output(tensor.name, self._value(tensor.name))
        return binding

    def _value(self, name: str) -> ort.OrtValue:
        """What a part's input or output is bound to. Layers use the same buffers in turn; of what is carried over,
        two, for a part reads the one while it writes the other."""
        base, _, number = name.partition(".")
        if base == "carried":
            base = f"carried.{int(number.partition('.')[0]) % 2}"
        elif base == "aux_hidden":
            base = name
        if base not in self._values:
            array = self._arrays.get(base)
            self._values[base] = _ort_value(getattr(self, base) if array is None else array)
        return self._values[base]

    def fill(
        self, rows: RowBatch, counts: np.ndarray, hidden: np.ndarray | None, candidates: np.ndarray | None
    ) -> None:
        """counts [B] = rows of each sequence."""
        if hidden is None or self._bound.is_first:
            self.token_ids[:] = rows.token_ids
        if hidden is not None:
            self.hidden[:] = hidden
        if candidates is not None:
            self.exit_candidates[:] = candidates
        self.logit_rows[:] = rows.logit_rows
        starts = rows.context_lens - rows.cu_rows[:-1]
        if counts.size == 1:
            self.positions[:] = np.arange(starts[0], starts[0] + self.positions.size)
        else:
            np.add(np.repeat(starts, counts), np.arange(self.positions.size), out=self.positions)

    def run_part(self, part: int) -> None:
        """The part of a call that is ONNX Runtime's."""
        self._bound.sessions[part].run_with_iobinding(self.bindings[part])

    def keep_features(self, rows: RowBatch, counts: np.ndarray, kv_block_size: int) -> None:
        """What a draft head reads of each row goes to where the row's keys and values lie."""
        if not self.features:
            return
        block, offset = np.divmod(self.positions, kv_block_size)
        blocks = rows.block_tables[np.repeat(np.arange(counts.size), counts), block]
        for name, array in self.features.items():
            self._bound.features[name][blocks, offset] = array


class ShapeCache:
    """The most recently used call shapes of one segment, bounded in number."""

    def __init__(self, bound: BoundSegment) -> None:
        self.bound = bound
        self._shapes: OrderedDict[ShapeKey, CallShape] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shapes)

    def get(self, key: ShapeKey) -> CallShape:
        shape = self._shapes.get(key)
        if shape is not None:
            self._shapes.move_to_end(key)
            return shape
        shape = self._shapes[key] = CallShape(self.bound, key)
        if len(self._shapes) > MAX_SHAPES:
            self._shapes.popitem(last=False)
        return shape


def _ort_value(array: np.ndarray) -> ort.OrtValue:
    """A tensor over the array's own memory; the array must be contiguous and outlive it."""
    assert array.flags.c_contiguous
    return ort.OrtValue.ortvalue_from_numpy(array)
