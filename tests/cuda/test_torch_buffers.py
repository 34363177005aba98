"""Inputs of GPU calls: their values for each row, their padding, and alternating staging areas."""

import numpy as np
import pytest

from faser_backend.core.batch import RowBatch
from faser_backend.cuda.buffers import ALIGNMENT, InputBlock, fill_inputs, upload
from faser_backend.cuda.call_shapes import CallBounds, exact_bounds
from faser_backend.manifest import TensorSpec
from tests.support.tiny_models import make_rows
from tests.support.torch_engines import CPU

BLOCK_SIZE = 4
INT32 = {"slot_mapping": "T", "cu_rows": "B + 1", "context_lens": "B", "block_table": "B,MB"}
INT64 = {"token_ids": "T", "positions": "T", "logit_rows": "R", "exit_candidates": "T,K", "pad_idx": "B,Q"}
KINDS = {"int32": INT32, "int64": {**INT64, "unpad_idx": "T"}}
INPUTS = [TensorSpec(name, kind, (*dims.split(","),)) for kind in KINDS for name, dims in KINDS[kind].items()]


def random_rows(rng: np.random.Generator) -> RowBatch:
    num = int(rng.integers(1, 6))
    starts, counts = rng.integers(0, 9, num), rng.integers(1, 7, num)
    sequences = [rng.integers(1, 97, 16) for _ in range(num)]
    tables = rng.permutation(40)[: num * 4].reshape(num, 4)
    num_rows = int(counts.sum())
    logit_rows = np.sort(rng.permutation(num_rows)[: int(rng.integers(0, num_rows + 1))])
    return make_rows(sequences, starts.tolist(), counts.tolist(), tables, logit_rows)


def filled(rows: RowBatch, bounds: CallBounds, candidates: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Returns the inputs on the device, written over an earlier call's in host and device memory."""
    block = InputBlock(INPUTS, bounds, CPU)
    block.block.fill_(0x5A)

    def fill(area: np.ndarray) -> None:
        area[:] = 0xA5
        fill_inputs(block.views(area), rows, bounds, BLOCK_SIZE, candidates)

    upload(block.block, fill)
    return {name: tensor.numpy() for name, tensor in block.tensors.items()}


@pytest.mark.parametrize("seed", range(20))
def test_inputs_say_where_each_row_is_and_writes(seed: int) -> None:
    rows = random_rows(np.random.default_rng(seed))
    num_rows, num_sequences = rows.num_rows, rows.num_sequences
    counts = rows.rows_per_sequence
    max_rows, width = int(counts.max()), rows.block_tables.shape[1]
    inputs = filled(rows, CallBounds(num_rows, num_sequences, max_rows, width, rows.logit_rows.shape[0], 0))
    sequence = np.repeat(np.arange(num_sequences), counts)
    offset = np.concatenate([np.arange(count) for count in counts])
    positions = rows.context_lens[sequence] + offset
    block = rows.block_tables[sequence, positions // BLOCK_SIZE]
    last_rows = rows.cu_rows[1:, None] - 1
    wanted = {
        "token_ids": rows.token_ids,
        "positions": positions,
        "unpad_idx": sequence * max_rows + offset,
        "pad_idx": np.minimum(rows.cu_rows[:-1, None] + np.arange(max_rows), last_rows),
        "block_table": rows.block_tables,
        "slot_mapping": block * BLOCK_SIZE + positions % BLOCK_SIZE,
        "logit_rows": rows.logit_rows,
        "context_lens": rows.context_lens,
        "cu_rows": rows.cu_rows,
    }
    for name, array in wanted.items():
        np.testing.assert_array_equal(inputs[name], array, err_msg=name)


@pytest.mark.parametrize("seed", range(20))
def test_padding_belongs_to_nobody_and_writes_nowhere(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = random_rows(rng)
    num_rows, num_sequences = rows.num_rows, rows.num_sequences
    candidates = rng.integers(0, 97, (num_rows, 3))
    exact = exact_bounds(rows, BLOCK_SIZE, 3)
    bounds = CallBounds(*map(sum, zip(exact, (5, 3, 2, 4, 6, 0), strict=False)))
    inputs, narrow = filled(rows, bounds, candidates), filled(rows, exact, candidates)
    for name, values in inputs.items():
        assert values.min(initial=0) >= -1 and values.max(initial=0) < 1000, f"{name} still holds earlier values"
    assert (inputs["slot_mapping"][num_rows:] == -1).all() and (inputs["slot_mapping"][:num_rows] >= 0).all()
    assert (inputs["cu_rows"][num_sequences:] == num_rows).all()
    for name in ("token_ids", "positions", "exit_candidates"):
        assert not inputs[name][num_rows:].any(), name
    for name in ("context_lens", "block_table"):
        assert not inputs[name][num_sequences:].any(), name
    assert not inputs["logit_rows"][rows.logit_rows.shape[0] :].any()
    assert inputs["pad_idx"].max() < num_rows
    for name in ("token_ids", "positions", "slot_mapping", "exit_candidates"):
        np.testing.assert_array_equal(inputs[name][:num_rows], narrow[name][:num_rows], err_msg=name)


def test_a_table_wider_than_the_bound_is_cut() -> None:
    rows = make_rows([np.arange(6)], [0], [6], np.arange(20)[None])
    inputs = filled(rows, CallBounds(8, 1, 8, 3, 6, 0))
    np.testing.assert_array_equal(inputs["block_table"], [[0, 1, 2]])


def test_tensors_of_a_block_are_aligned_and_apart() -> None:
    block = InputBlock(INPUTS, CallBounds(7, 3, 5, 9, 2, 0), CPU)
    starts = [tensor.data_ptr() - block.block.data_ptr() for tensor in block.tensors.values() if tensor.numel()]
    assert all(start % ALIGNMENT == 0 for start in starts) and len(set(starts)) == len(starts)
    for index, tensor in enumerate(block.tensors.values()):
        tensor.fill_(index)
    assert all((tensor == index).all() for index, tensor in enumerate(block.tensors.values()))
