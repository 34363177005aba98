"""Checks and converts large arrays block by block, so that no second copy of an array is in memory."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from faser_backend.engines.checkpoint import CheckpointError

BLOCK_ELEMENTS = 1 << 23
COPIED_COLUMNS = 256
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)  # the import registers the name with numpy
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}  # by the names of safetensors
FLOAT_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # by the manifest's dtypes
_EXPONENTS = {  # these bits are all set only in infinities and NaNs
    np.dtype(np.float32): np.uint32(0x7F800000),
    np.dtype(np.float16): np.uint16(0x7C00),
    BFLOAT16: np.uint16(0x7F80),
}


def row_blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, rows) in order, at most BLOCK_ELEMENTS numbers or one row at a time."""
    num_rows = max(BLOCK_ELEMENTS // max(array[:1].size, 1), 1)
    for first in range(0, len(array), num_rows):
        yield first, array[first : first + num_rows]


def checked_finite(array: np.ndarray, name: str, where: str = "") -> np.ndarray:
    """Returns the array. Raises CheckpointError naming it and the index of an infinity or a NaN."""
    exponents = _EXPONENTS[array.dtype]
    for first, block in row_blocks(array):
        is_bad = block.view(exponents.dtype) & exponents == exponents
        if is_bad.any():
            row, *rest = (int(i) for i in np.argwhere(is_bad)[0])
            index = (first + row, *rest)
            raise CheckpointError(f"{name}{list(index)}{where} = {array[index]}: must be finite")
    return array


def converted_blocks(name: str, array: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yields the rows of an array of finite numbers in order, contiguous and in `dtype`.

    Raises CheckpointError naming the array if a number does not fit the format.
    """
    limit = float(ml_dtypes.finfo(dtype).max)
    for _, block in row_blocks(array):
        if limit < float(ml_dtypes.finfo(block.dtype).max):
            largest = max(float(block.max()), -float(block.min()))
            if largest > limit:
                raise CheckpointError(f"{name}: its largest weight = {largest:.6g}: {dtype} holds at most {limit:.6g}")
        yield _contiguous(block, dtype)


def _contiguous(block: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts a block. Transposed blocks are copied in groups of columns that fit the cache, up to 6x as fast."""
    if block.ndim != 2 or block.flags.c_contiguous:
        return np.ascontiguousarray(block, dtype)
    copied = np.empty(block.shape, dtype)
    for first in range(0, block.shape[1], COPIED_COLUMNS):
        columns = slice(first, first + COPIED_COLUMNS)
        copied[:, columns] = np.asarray(block[:, columns].T, dtype).T
    return copied
