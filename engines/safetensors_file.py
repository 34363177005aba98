"""Safetensors files: mapped for reading, streamed for writing, so that no model is ever held in memory.

The library checks a file as a whole (header, offsets, length); this module adds where each tensor lies, which
number formats can be built from, and that numbers are finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from faser_backend.engines.arrays import BFLOAT16, first_not_finite
from faser_backend.engines.checkpoint_base import CheckpointError
from faser_backend.files import FileError, check_regular

INTEGERS = ("I64", "I32", "BOOL")
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
_NUM_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I64": 8}
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


class NewTensor(NamedTuple):
    """One that is to be written: its pieces are asked for when it is its turn, contiguous and in order."""

    name: str
    dtype: str  # as the format spells it
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]


def write_safetensors(path: Path, tensors: Sequence[NewTensor], alignment: int = 1) -> None:
    """Writes tensors one after the other, each at a multiple of `alignment` bytes of the file."""
    header: dict[str, dict] = {}
    end = 0

    def announce(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        nonlocal end
        first, end = end, end + math.prod(shape) * _NUM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}

    for tensor in tensors:
        announce(tensor.name, tensor.dtype, tensor.shape)
        if end % alignment:  # safetensors allows no gap between tensors
            announce(f"{tensor.name}.gap", "U8", (-end % alignment,))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % max(alignment, 8))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for piece in tensor.pieces():
                file.write(np.ascontiguousarray(piece).view(np.uint8).data)
            file.write(bytes(-file.tell() % alignment))
