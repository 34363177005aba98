"""One GGUF file: rows as it stores them, mapped, and the numbers that they stand for.

Quantised rows are dequantised some at a time, when a tensor is asked for; no tensor is kept.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engines.arrays import BFLOAT16, CheckpointError, first_not_finite
from engines.gguf_header import read_header

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
SCALES = "F16"  # the format that the scales of all quantised types have
NUMBERS_AT_ONCE = 1 << 20


class GGUFFile:
    """Tensors by the file's names. Errors are CheckpointErrors that name the file and the tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self.tensors = read_header(path)

    def dtype(self, name: str) -> str:
        """The format of a tensor's numbers, or of the scales that quantised ones are multiplied by."""
        type_name = self.tensors[name].type_name
        return type_name if type_name in DTYPES else SCALES

    def rows(self, name: str, part: int | None = None) -> np.ndarray:
        """A tensor as it is stored, mapped: numbers, or bytes of blocks [..., row_bytes] where it is quantised.

        part: the index along the first axis, where only that part is wanted.
        """
        tensor = self.tensors[name]
        dtype, shape = DTYPES.get(tensor.type_name), tensor.shape
        if dtype is None:
            dtype, shape = np.dtype(np.uint8), (*shape[:-1], tensor.row_bytes)
        mapped = np.memmap(self.path, dtype, "r", tensor.first_byte, shape)
        return mapped if part is None else mapped[part]

    def numbers(self, name: str, rows: np.ndarray) -> np.ndarray:
        """What rows of a tensor stand for: as they are stored, or float32 where they are quantised.

        Raises CheckpointError where a number is not finite.
        """
        type_name = self.tensors[name].type_name
        found = rows if type_name in DTYPES else _dequantised(rows, type_name)
        index = first_not_finite(found)
        if index is not None:
            raise CheckpointError(f"{self.path}: {name}{list(index)} = {found[index]}: must be finite")
        return found


def _dequantised(rows: np.ndarray, type_name: str) -> np.ndarray:
    """Blocks [..., row_bytes] -> float32 [..., row size], exactly what they stand for."""
    kind = GGMLQuantizationType[type_name]
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    flat = rows.reshape(-1, rows.shape[-1])
    found = np.empty((len(flat), rows.shape[-1] // block_bytes * block_size), np.float32)
    step = max(NUMBERS_AT_ONCE // found.shape[1], 1)
    with np.errstate(all="ignore"):  # what overflows is found by who looks for numbers that are not finite
        for first in range(0, len(flat), step):
            found[first : first + step] = dequantize(flat[first : first + step], kind)
    return found.reshape(*rows.shape[:-1], -1)
