"""Safetensors files: mapped for reading, streamed for writing, so that no model is ever held in memory.

The library checks a file as a whole (header, offsets, length); this module adds where each tensor lies, which
number formats can be built from, and that numbers are finite.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from engines.arrays import BFLOAT16, CheckpointError, converted_blocks, first_not_finite
from faser_backend.files import FileError, check_regular

INTEGERS = ("I64", "I32", "BOOL")
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {np.dtype(np.int64): "I64"}
_METADATA = "__metadata__"


class SafetensorsFile:
    """A checked file. The mapping of a tensor lives as long as the array that `read` returned."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError naming the file where it is missing or malformed."""
        self.path = path
        try:
            check_regular(path)
            with safe_open(path, "np"):
                pass
            with path.open("rb") as file:
                num_header_bytes = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(num_header_bytes))
        except FileError as error:
            raise CheckpointError(str(error)) from None
        except (OSError, SafetensorError, RecursionError) as error:
            raise CheckpointError(f"{path}: not readable as safetensors ({error})") from None
        self._entries: dict[str, dict] = {name: entry for name, entry in header.items() if name != _METADATA}
        self._first_byte = 8 + num_header_bytes

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> str:
        """The format as safetensors spells it. Raises CheckpointError for one that cannot be built from."""
        dtype = self._entries[name]["dtype"]
        if dtype not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} has dtype {dtype}: must be one of {', '.join(DTYPES)}")
        return dtype

    def read(self, name: str, part: int | slice | tuple[int | slice, ...] = ()) -> np.ndarray:
        """A read-only view of a tensor, or of a part of it, in the file's dtype.

        Raises CheckpointError where a number of that part is not finite.
        """
        offset = self._first_byte + self._entries[name]["data_offsets"][0]
        tensor = np.memmap(self.path, DTYPES[self.dtype(name)], "r", offset, self.shape(name))[part]
        index = first_not_finite(tensor)
        if index is not None:
            where = f" of part {part}" if part != () else ""
            raise CheckpointError(f"{self.path}: {name}{list(index)}{where} = {tensor[index]}: must be finite")
        return tensor

    def read_integers(self, name: str) -> np.ndarray:
        """A tensor of whole numbers or truth values as int64. Raises CheckpointError for another format."""
        dtype = self._entries[name]["dtype"]
        if dtype not in INTEGERS:
            raise CheckpointError(f"{self.path}: {name} has dtype {dtype}: must be one of {', '.join(INTEGERS)}")
        with safe_open(self.path, "np") as file:
            return file.get_tensor(name).astype(np.int64)


def write_safetensors(
    path: Path, formats: dict[str, tuple[np.dtype, tuple[int, ...]]], arrays: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes arrays in the order and the formats (dtype, shape) that were announced, one after the other.

    Raises CheckpointError where a number does not fit its format.
    """
    header, end = {}, 0
    for name, (dtype, shape) in formats.items():
        first, end = end, end + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, array), (announced, (dtype, shape)) in zip(arrays, formats.items(), strict=True):
            assert (name, array.shape) == (announced, shape)
            for block in [array] if dtype == np.int64 else converted_blocks(name, array, dtype):
                file.write(block.view(np.uint8).data)
