"""Runners on one share of a GPU with a KV pool: of a model, of a draft head, of a block drafter.

They implement core.ports.ModelRunner, HeadRunner and BlockRunner over programs (segment.py). A call is one asynchronous
copy of its integers and one graph replay, both on the stream of the runner's share, on any thread. Nothing waits for
the device. On a torch CPU device everything runs the same way without graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch

from faser_backend.core.adapter import AdapterMatrices
from faser_backend.core.batch import RowBatch
from faser_backend.cuda.buffers import (
    ADAPTERS,
    COLUMNS,
    NO_SLOT,
    PADDED,
    SLOT_MAPPING,
    TABLE,
    TABLE_WIDTH,
    WIDTH,
    InputBlock,
    TensorStore,
    call_tensors,
    fill_inputs,
    num_columns,
    put_tables,
    to_device,
    to_host,
    upload,
)
from faser_backend.cuda.call_shapes import UNLIMITED, CallBounds, CallMenu
from faser_backend.cuda.graphs import CallCache, GraphCapturer, RepeatedLaunch
from faser_backend.cuda.pool import CudaKvPool
from faser_backend.cuda.segment import Launch, PreparedCall, SegmentProgram
from faser_backend.cuda.streams import SmPartition, on_share
from faser_backend.cuda.torch_programs import TorchBlock
from faser_backend.cuda.torch_weights import AdapterTensors
from faser_backend.manifest import ModelEngine, TensorSpec

_log = logging.getLogger(__name__)
JOIN, LAYER = 0, 1  # segments of a draft that reads its target


class _Call:
    """One segment's call of one shape: its tensors, which each call fills, and its launch."""

    def __init__(self, inputs: InputBlock, tensors: Mapping[str, torch.Tensor], launch: Launch) -> None:
        self.inputs = inputs
        self.tensors = tensors
        self.launch = launch
        self.hidden = tensors.get("hidden")
        # A block drafter's segment without layers has no result; any rows stand for it.
        self.result = next(tensors[name] for name in ("logits", "hidden_out", "slot_mapping") if name in tensors)
        self.exit_scores = tensors.get("exit_scores")


class CudaRunner:
    """Runs the segments of one model. Calls are serial; concurrent runners on one pool need different sequences."""

    num_ahead = 0  # a row's token position minus its KV position

    def __init__(
        self,
        model: ModelEngine,
        programs: Sequence[SegmentProgram],
        pool: CudaKvPool,
        device: torch.device,
        *,
        limits: CallBounds | None = None,
        capturer: GraphCapturer | None = None,
        share: SmPartition | None = None,
    ) -> None:
        """programs: one per segment, in order. limits: the largest bounds that they take; None = any.

        capturer: None = no graphs. share: None = calls are queued on the calling thread's current stream.
        """
        self.on_share = nullcontext if share is None else share.current
        self.spec = model.spec
        self.pool = pool
        self.num_segments = len(model.segments)
        self.num_layers = tuple(segment.last_layer - segment.first_layer for segment in model.segments)
        self.exits = frozenset(index for index, segment in enumerate(model.segments) if segment.has_exit_scores)
        self.vocab_size = model.spec.vocab_size
        self.block_size, self.mask_id = model.spec.block_size, model.spec.mask_id  # of a block drafter
        # The number that each sequence of a full batch may have.
        self.max_logit_rows = None if limits is None else max(limits.num_logit_rows // limits.num_sequences, 1)
        self.capturer = capturer
        most = limits or UNLIMITED._replace(num_blocks=-(-model.spec.max_context // pool.kv_block_size))
        is_padded = any(tensor.name == PADDED for segment in model.segments for tensor in segment.inputs)
        self.shapes = CallMenu(pool.kv_block_size, most, is_padded)
        # A padded call would pad every sequence to a chunk.
        self.max_mixed_rows: int | None = 0 if is_padded else max(self.shapes.menu(0)).num_rows
        self._segments = model.segments
        self._programs: Sequence[SegmentProgram] = programs
        self._device = device
        self.limits = limits
        self._store = TensorStore(device)
        self._calls = [
            CallCache[CallBounds, _Call](
                lambda bounds, is_kept, index=index: self._open_call(index, bounds, is_kept=is_kept)
            )
            for index in range(self.num_segments)
        ]
        self._clearing: list[Callable[[], None]] = [calls.clear for calls in self._calls]

    @on_share
    def run_segment(self, segment: int, rows: RowBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """See core.ports.ModelRunner. The result is a device buffer that the stream is going to fill.

        A later call of the same shape overwrites it.
        """
        call = self._run(segment, rows, hidden, None)
        return call.result[: rows.logit_rows.shape[0] if segment == self.num_segments - 1 else rows.num_rows]

    def run_unseen(self, rows: RowBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs all segments; returns logits [R, V] and, for a draft head, its next input [R, hidden_size]."""
        output = self.run_segment(0, rows, None)
        for segment in range(1, self.num_segments):
            output = self.run_segment(segment, rows, output)
        return output, None

    @on_share
    def run_segment_with_scores(
        self, segment: int, rows: RowBatch, hidden: torch.Tensor | None, exit_candidates: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See core.ports.ModelRunner. Both results are buffers like run_segment's."""
        assert segment in self.exits, f"segment {segment} has no exit scores"
        call = self._run(segment, rows, hidden, exit_candidates)
        assert call.exit_scores is not None
        return call.result[: rows.num_rows], call.exit_scores[: rows.num_rows]

    @on_share
    def take_rows(self, hidden: torch.Tensor, kept: np.ndarray) -> torch.Tensor:
        return torch.index_select(hidden, 0, to_device(kept, self._device))

    @on_share
    def capture_menu(self, num_candidates: int) -> None:
        """Captures every call of the menu on the current stream, with padding rows only, so pools do not change.

        num_candidates: of exit scores, or 0 if they are never requested.
        """
        for index in range(self.num_segments):
            counts = [0, num_candidates] if num_candidates and index in self.exits else [0]
            known = [bounds for count in counts for bounds in self.shapes.menu(count)]
            if self.pool.captures_adapters:
                known += [bounds._replace(has_adapters=True) for bounds in known]
            for bounds in dict.fromkeys(
                self.bounds_of(index, bounds) for bounds in known[::-1]
            ):  # smaller ones reuse memory
                call = self._calls[index][bounds]
                call.inputs.fill_idle()
                call.launch()
                call.launch()

    def prepare_decode(self, bounds: CallBounds) -> PreparedCall:
        """Prepares a call of one row with logits per sequence, whose integers the device may write between launches.

        Its tensors are the inputs of all segments by manifest name, always slot_mapping, and logits [T, V]. A draft
        head's also have hidden [T, hidden_size], which each launch overwrites with the next one's input. cu_rows,
        logit_rows and padding indices are final; slot_mapping holds -1, the rest 0. Every call has separate inputs.
        """
        num_sequences, is_head = bounds.num_sequences, self.spec.reads_target
        # Rows of tokens that a head has drafted read no features of the target.
        segments = (LAYER,) if is_head else range(self.num_segments)
        wanted = {tensor.name: tensor for index in segments for tensor in self._filled_inputs(index, bounds)}
        inputs = InputBlock(wanted.values(), bounds, self._device)
        nothing = np.zeros(num_sequences, np.int64)
        idle = RowBatch(nothing, np.arange(num_sequences + 1), nothing, nothing[:, None], np.arange(num_sequences))

        def fill(tables: np.ndarray) -> None:
            def fill_area(area: np.ndarray) -> None:
                views = inputs.views(area)
                others = {name: view for name, view in views.items() if name not in {TABLE, WIDTH}}
                fill_inputs(others, idle, bounds, 1)
                put_tables(views, tables)
                views["slot_mapping"][:] = NO_SLOT

            upload(inputs.block[: inputs.num_bytes(*tables.shape)], fill_area)

        fill(nothing[:, None])
        launches: list[Launch] = []
        tensors: dict[str, torch.Tensor] = {}
        for index in segments:
            tensors = call_tensors(self._segments[index], bounds, inputs=inputs, store=self._store, pool=self.pool)
            if is_head:
                tensors["hidden_out"] = tensors["hidden"]
            launches.append(self._programs[index].prepare(tensors, bounds))

        def launch() -> None:
            for queue in launches:
                queue()

        results = {name: tensors[name] for name in (("logits", "hidden") if is_head else ("logits",))}
        return PreparedCall({**inputs.tensors, **results}, launch, fill)

    def clear_at_close(self, clear: Callable[[], None]) -> None:
        """Registers `clear`, which frees graphs of prepared calls: they must not outlive a share's stream."""
        self._clearing.append(clear)

    def close(self) -> None:
        """Waits for the device, then frees graphs and buffers; the runner cannot be used afterwards."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for clear in self._clearing:
            clear()
        self._programs = ()
        self._store = TensorStore(self._device)

    def _run(self, segment: int, rows: RowBatch, hidden: torch.Tensor | None, candidates: np.ndarray | None) -> _Call:
        num_candidates = 0 if candidates is None else candidates.shape[1]
        shape = self.shapes.of(rows, num_candidates)
        bounds = self.bounds_of(segment, shape)
        adapters = set(filter(None, rows.adapters))
        if adapters:
            bounds = bounds._replace(has_adapters=True)
        if self.shapes.holds(shape) and (self.pool.captures_adapters or not adapters):
            call = self._calls[segment][bounds]
        else:  # as a large prompt chunk
            call = self._open_call(segment, bounds, is_kept=False)
        block_size, inputs = self.pool.kv_block_size, call.inputs
        used = inputs.block[: inputs.num_bytes(rows.num_sequences, num_columns(rows, block_size))]
        upload(used, lambda area: fill_inputs(inputs.views(area), rows, bounds, block_size, candidates))
        if call.hidden is not None:
            assert hidden is not None, f"segment {segment} needs the hidden states of the segment before"
            if hidden.data_ptr() != call.hidden.data_ptr():  # equal if no row was pruned after the segment before
                call.hidden[: rows.num_rows].copy_(hidden, non_blocking=True)
        call.launch()
        for adapter in adapters if self._device.type == "cuda" else ():
            for tensor in (adapter.memory, adapter.table):  # no one else gets them before the call has run
                tensor.record_stream(torch.cuda.current_stream())
        return call

    def _open_call(self, index: int, bounds: CallBounds, *, is_kept: bool) -> _Call:
        """is_kept: otherwise its tensors are temporary: the allocator takes them back."""
        store = self._store if is_kept else TensorStore(self._device)
        inputs = InputBlock(self._filled_inputs(index, bounds), bounds, self._device)
        tensors = call_tensors(self._segments[index], bounds, inputs=inputs, store=store, pool=self.pool)
        launch = self._programs[index].prepare(tensors, bounds, is_kept=is_kept)
        if is_kept:
            launch = RepeatedLaunch(launch, self.capturer, f"segment {index} with {bounds}")
        return _Call(inputs, tensors, launch)

    def _filled_inputs(self, index: int, bounds: CallBounds) -> list[TensorSpec]:
        """Returns the integer inputs that a batch is written into, always with slot_mapping."""
        integers = (tensor for tensor in self._segments[index].inputs if tensor.dtype.startswith("int"))
        filled = {tensor.name: tensor for tensor in integers if tensor.name != COLUMNS}
        filled.setdefault(SLOT_MAPPING.name, SLOT_MAPPING)
        more = [TABLE_WIDTH] * self._programs[index].packs_tables + [ADAPTERS] * bounds.has_adapters
        return [*filled.values(), *more]

    def bounds_of(self, segment: int, bounds: CallBounds) -> CallBounds:
        """Returns the bounds that distinguish one segment's calls: only the last of a compiled model has logits.

        A segment without layers computes every row alone.
        """
        if not self.num_layers[segment]:
            return CallBounds(bounds.num_rows, 0, 0, 0, 0, 0)
        is_last = self.limits is None or segment == self.num_segments - 1
        return bounds if is_last else bounds._replace(num_logit_rows=0)


class CudaAdaptableRunner(CudaRunner):
    """Runs a decoder of runtime torch; a core.adapter.AdaptableRunner.

    Calls with adapters are captured if there is one before the menu is.
    """

    def store_adapter(self, matrices: AdapterMatrices) -> AdapterTensors:
        if not self.pool.captures_adapters and any(self._calls):
            _log.warning("steps with LoRA adapters run without CUDA graphs: start with --lora to capture them")
        self.pool.captures_adapters |= not any(self._calls)
        return AdapterTensors(matrices, self.spec.num_layers, self._device)


class CudaBlockRunner(CudaRunner):
    """Runs a block drafter."""

    def __init__(self, model: ModelEngine, programs: Sequence[SegmentProgram], *arguments: Any, **options: Any) -> None:
        super().__init__(model, programs, *arguments, **options)
        head, self.num_idle = self._program.head, model.spec.num_idle
        self.has_bias, self.token_confidences = head.bias is not None, head.token_confidences

    @property
    def _program(self) -> TorchBlock:  # not kept: closing the runner frees its weights
        return cast(TorchBlock, self._programs[LAYER])

    @on_share
    def run_block(self, rows: RowBatch) -> tuple[torch.Tensor, np.ndarray | None]:
        """See core.ports.BlockRunner. Waits for the call if there are confidences."""
        call, num_made = self._run(LAYER, rows, None, None), rows.logit_rows.shape[0]
        logits, weight = call.result[:num_made], self._program.head.confidence
        if weight is None:
            return logits, None
        return logits, to_host((call.tensors["hidden_out"][:num_made].float() * weight).sum(1))[0]

    @on_share
    def biased(self, logits: torch.Tensor, index: np.ndarray, previous: np.ndarray) -> torch.Tensor:
        return self._program.biased(self.take_rows(logits, index), to_device(previous, self._device))


class CudaHeadRunner(CudaRunner):
    """Runs an EAGLE-3 head. Its pool shares `features` with the target's pool.

    The target's calls write the hidden states that the head reads there, by slot_mapping like keys and values. Segment
    JOIN joins those of a call's rows, and LAYER is the layer. A call's output for the next call stays on the device.
    """

    num_ahead = 1

    @on_share
    def run_layer(self, rows: RowBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See core.ports.HeadRunner. Both results are buffers like run_segment's."""
        call, num_made = self._run(LAYER, rows, hidden, None), rows.logit_rows.shape[0]
        return call.tensors["logits"][:num_made], call.tensors["hidden_out"][:num_made]

    def run_unseen(self, rows: RowBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run_layer(rows, self.run_segment(JOIN, rows, None))

    @on_share
    def take_rows(self, hidden: torch.Tensor, kept: np.ndarray) -> torch.Tensor:
        """See core.ports.ModelRunner. Adjacent rows, as when all chains continue, need no index on the device."""
        first = int(kept[0]) if kept.size else 0
        if kept.size and int(kept[-1]) - first + 1 == kept.size:
            return hidden[first : first + kept.size].clone()
        return super().take_rows(hidden, kept)
