"""The tensors of GPU calls, by their names in the manifest: inputs in one block, pools, hidden states, results.

Numpy writes a call's integers into pinned host memory; one asynchronous copy takes them to the device. Pinned memory
comes from torch's cache, which reuses it only after the copies queued from it have run: it needs no owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from faser_backend.core.batch import RowBatch
from faser_backend.core.ports import Behind, run_behind
from faser_backend.cuda.call_shapes import DIMENSIONS, CallBounds
from faser_backend.cuda.pool import CudaKvPool
from faser_backend.manifest import SegmentSpec, TensorSpec

ALIGNMENT = 256  # bytes; compiled engines require it of addresses
TABLE, WIDTH = "block_table", "table_width"
NO_SLOT = -1  # in slot_mapping: the row writes no key and value
SLOT_MAPPING = TensorSpec("slot_mapping", "int32", ("T",))
TABLE_WIDTH = TensorSpec(WIDTH, "int32", (1,))
FEATURES = "features"  # the target's hidden states that a draft head reads, in the target's pool
FEATURE_ROWS = "aux_hidden"  # one layer's rows of them, an input or output of a compiled engine
PADDED = "pad_idx"  # an input of segments that pad every sequence to the longest
ADAPTERS = TensorSpec("adapters", "int64", ("T",))  # addresses of rows' tables, see plugins.add_adapters
COLUMNS = "columns"  # an integer input that is the same in every call


def shape_in_call(tensor: TensorSpec, bounds: CallBounds) -> tuple[int, ...]:
    """Returns the shape of a segment's tensor, whose dimensions' names the manifest explains, in a call."""
    sizes = dict(zip(DIMENSIONS, bounds, strict=False)) | {"B + 1": bounds.num_sequences + 1}
    return tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)


class InputBlock:
    """Integer inputs of one call shape: `tensors` by name, all views of `block` on the device.

    The block table comes last. If table_width is an input, its rows are packed, and a call uploads what it needs.
    """

    def __init__(self, inputs: Iterable[TensorSpec], bounds: CallBounds, device: torch.device) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._spans: list[tuple[str, slice, np.dtype, tuple[int, ...]]] = []  # name, bytes, dtype, shape
        num_bytes = 0
        for tensor in sorted(inputs, key=lambda tensor: tensor.name == TABLE):
            dtype, shape = np.dtype(tensor.dtype), shape_in_call(tensor, bounds)
            end = num_bytes + math.prod(shape) * dtype.itemsize
            self._spans.append((tensor.name, slice(num_bytes, end), dtype, shape))
            num_bytes = -(-end // ALIGNMENT) * ALIGNMENT
        self.block = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        for name, span, dtype, shape in self._spans:
            self.tensors[name] = self.block[span].view(getattr(torch, dtype.name)).view(shape)

    def fill_idle(self) -> None:
        """Fills the inputs on the device with padding rows, which belong to no sequence and write nothing."""
        self.block.zero_()
        self.tensors["slot_mapping"].fill_(NO_SLOT)

    def num_bytes(self, num_sequences: int, num_columns: int) -> int:
        """Returns the bytes of `block` that a call with block tables [num_sequences, num_columns] fills."""
        if WIDTH not in self.tensors:
            return self.block.numel()
        _, span, dtype, shape = self._spans[-1]
        assert num_sequences * num_columns <= math.prod(shape), f"tables {num_sequences} x {num_columns} in {shape}"
        return span.start + num_sequences * num_columns * dtype.itemsize

    def views(self, area: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the inputs by name, as views of host memory area [num_bytes(...)] uint8; a packed table is flat."""
        found = {}
        for name, span, dtype, shape in self._spans:
            is_flat = name == TABLE and WIDTH in self.tensors
            found[name] = area[span].view(dtype) if is_flat else area[span].view(dtype).reshape(shape)
        return found


def fill_inputs(
    inputs: Mapping[str, np.ndarray],
    rows: RowBatch,
    bounds: CallBounds,
    kv_block_size: int,
    candidates: np.ndarray | None = None,
) -> None:
    """Writes a batch into arrays with the shapes of `bounds`; names that are not in `inputs` are skipped.

    Padding: rows of token 0 at position 0 with NO_SLOT, sequences without rows or context, logit rows that repeat row
    0. Entries of pad_idx past a sequence's rows repeat its last row.
    """
    num_rows, num_sequences = rows.num_rows, rows.num_sequences
    sequence = np.repeat(np.arange(num_sequences), rows.cu_rows[1:] - rows.cu_rows[:-1])  # [T]
    offset = np.arange(num_rows) - rows.cu_rows[sequence]
    positions = rows.context_lens[sequence] + offset
    block, in_block = np.divmod(positions, kv_block_size)
    _put(inputs, "token_ids", rows.token_ids, 0)
    _put(inputs, "positions", positions, 0)
    _put(inputs, "slot_mapping", rows.block_tables[sequence, block] * kv_block_size + in_block, NO_SLOT)
    _put(inputs, "cu_rows", rows.cu_rows, num_rows)
    _put(inputs, "context_lens", rows.context_lens, 0)
    put_tables(inputs, rows.block_tables[:, : bounds.num_blocks])
    _put(inputs, "logit_rows", rows.logit_rows, 0)
    if candidates is not None:
        _put(inputs, "exit_candidates", candidates, 0)
    if bounds.has_adapters:
        tables = np.array([each.table.data_ptr() if each else 0 for each in rows.adapters])
        _put(inputs, ADAPTERS.name, tables[sequence], 0)
    if PADDED in inputs:
        columns = np.arange(bounds.max_rows)
        padded = np.minimum(rows.cu_rows[:-1, None] + columns, rows.cu_rows[1:, None] - 1)
        _put(inputs, PADDED, padded, 0)
        _put(inputs, "unpad_idx", sequence * bounds.max_rows + offset, 0)


def num_columns(rows: RowBatch, kv_block_size: int) -> int:
    """Returns the number of block table columns that a batch uses."""
    return -(-int((rows.context_lens + rows.rows_per_sequence).max(initial=1)) // kv_block_size)


def put_tables(inputs: Mapping[str, np.ndarray], tables: np.ndarray) -> None:
    """Writes tables [B, any], padded with zeros, or packed into a flat array of B rows."""
    if WIDTH not in inputs:
        _put(inputs, TABLE, tables, 0)
        return
    count = tables.shape[0]
    width = inputs[TABLE].size // max(count, 1)
    inputs[WIDTH][0] = width
    inputs[TABLE].reshape(count, width)[:] = tables[:, :width]


def _put(inputs: Mapping[str, np.ndarray], name: str, values: np.ndarray, filler: int) -> None:
    """Writes values into the leading corner of an input and `filler` into the rest."""
    target = inputs.get(name)
    if target is None:
        return
    num = values.shape[0]
    target[num:] = filler
    if target.ndim == 1:
        target[:num] = values
    else:
        target[:num, : values.shape[1]] = values
        target[:num, values.shape[1] :] = filler


class TensorStore:
    """Tensors that calls share, by name and shape; created on first use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor; a new one is zeroed, because padding rows are computed too and must be finite."""
        key = (name, shape)
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._tensors[key]


def call_tensors(
    segment: SegmentSpec, bounds: CallBounds, *, inputs: InputBlock, store: TensorStore, pool: CudaKvPool
) -> dict[str, torch.Tensor]:
    """Returns the tensors that a program of the segment is prepared with. Calls of one shape share those in `store`.

    A pool that is also an output is the input's memory. hidden_out of a segment is hidden of the next one.
    """
    tensors = dict(inputs.tensors)
    layers = {"hidden": f"hidden {segment.first_layer}", "hidden_out": f"hidden {segment.last_layer}"}
    for tensor in (*segment.inputs, *segment.outputs):
        name, _, layer = tensor.name.partition(".")
        dtype = getattr(torch, tensor.dtype)
        if name in {"k_pool", "k_pool_out"}:
            tensors[tensor.name] = pool.keys(int(layer))
        elif name in {"v_pool", "v_pool_out"}:
            tensors[tensor.name] = pool.values(int(layer))
        elif name == FEATURES:
            tensors[name] = pool.features
        elif name == FEATURE_ROWS:
            tensors[FEATURES] = pool.features
            tensors[tensor.name] = store.get(tensor.name, shape_in_call(tensor, bounds), dtype)
        elif name == COLUMNS:
            size = bounds.num_blocks * pool.kv_block_size
            tensors[name] = torch.arange(size, out=store.get(name, (size,), dtype))
        elif name == "logits":
            tensors[name] = pool.logits_of(*shape_in_call(tensor, bounds))
        elif name not in inputs.tensors:
            shape = shape_in_call(tensor, bounds)
            tensors[tensor.name] = store.get(layers.get(tensor.name, tensor.name), shape, dtype)
    return tensors


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns a copy of the array on the device; on a GPU the copy is queued, not waited for."""
    if device.type != "cuda":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def upload(block: torch.Tensor, fill: Callable[[np.ndarray], None]) -> None:
    """Lets `fill` write block.numel() bytes of host memory, and queues their copy to block (uint8, 1-D)."""
    area = torch.empty(block.numel(), dtype=torch.uint8, pin_memory=block.is_cuda)
    fill(area.numpy())
    block.copy_(area, non_blocking=True)


def to_host(*tensors: torch.Tensor, behind: Behind | None = None) -> list[np.ndarray]:
    """Copies tensors of one device to the host, after one wait for all work of the current stream.

    behind: what the host does first, while the device works.
    """
    is_cuda = tensors[0].is_cuda
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    if is_cuda:
        done = torch.cuda.Event()
        done.record()
        run_behind(behind)
        done.synchronize()  # without the interpreter lock, so that the other lane goes on
        # Freeing pinned memory records events on the streams that used it. So no result keeps it: it could outlive the
        # stream of a share.
        return [copy.numpy().copy() for copy in copies]
    run_behind(behind)
    return [copy.numpy() for copy in copies]
