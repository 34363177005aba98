"""The head of a GGUF file: its metadata and its table of tensors.

The file is mapped and nothing in it is trusted: every count, length, type and offset is checked before it is used,
so that a damaged file costs one error and no memory. Knows the layout; nothing of models or tokenizers.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engines.arrays import CheckpointError
from faser_backend.files import FileError, check_regular

VERSIONS = (2, 3)
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
MAX_HEAD_BYTES = 256 << 20
MAX_ENTRIES = 1 << 16  # of metadata, and tensors
MAX_ELEMENTS = 1 << 23  # of an array in the metadata
MAX_TEXT_BYTES = 16 << 20
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
ALIGNMENT = "general.alignment"

_TEXT, _ARRAY, _TRUTH = 8, 9, 7
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _TRUTH: "B", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct("<" + code) for kind, code in _CODES.items()}
_COUNT, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")


class GGUFTensor(NamedTuple):
    """Where a tensor lies and how: rows of whole blocks, the last axis of `shape` being the row."""

    type_name: str  # one of TYPES
    shape: tuple[int, ...]  # outermost axis first
    first_byte: int  # in the file

    @property
    def row_bytes(self) -> int:
        """Bytes that the numbers of the last axis take."""
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type_name]]
        return self.shape[-1] // block_size * block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape[:-1]) * self.row_bytes


class GGUFHeader(NamedTuple):
    """What a file says before its numbers begin."""

    metadata: dict[str, Any]  # numbers, truth values, text, lists of text, arrays of numbers
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFHeader:
    """Reads and checks a file's head. Raises CheckpointError naming file, field, value and limit."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise CheckpointError(f"{path}: {size} bytes: a GGUF file begins with 24 bytes of magic and counts")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Head(path, data, size).read()
    except FileError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{path}: not readable ({error})") from None


class _Head:
    """A walk through the head, from its first byte on."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._at = 0

    def read(self) -> GGUFHeader:
        magic = self._data[:4]
        if magic != b"GGUF":
            raise self._error("magic", magic, "a GGUF file begins with b'GGUF'")
        self._at = 4
        version = self._scalar(_COUNT, "version")
        if version not in VERSIONS:
            swapped = "; its bytes are in the other order" if version & 0xFFFF == 0 and version else ""
            raise self._error("version", version, f"must be one of {', '.join(map(str, VERSIONS))}{swapped}")
        num_tensors, num_entries = (self._count(what, MAX_ENTRIES) for what in ("tensor_count", "metadata_kv_count"))
        metadata: dict[str, Any] = {}
        for index in range(num_entries):
            key = self._text(f"key of metadata entry {index}", MAX_KEY_BYTES)
            if key in metadata:
                raise self._error("metadata key", key, "occurs twice")
            metadata[key] = self._value(repr(key)[1:-1], self._scalar(_COUNT, f"type of {key!r}"))
        alignment = _alignment(self._path, metadata)
        found = [self._tensor(index) for index in range(num_tensors)]
        return GGUFHeader(metadata, self._placed(found, alignment))

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(key, kind)
        if kind == _TEXT:
            return self._text(key, MAX_TEXT_BYTES)
        if kind != _ARRAY:
            raise self._error(f"type of {key}", kind, "must lie in [0, 12]")
        kind = self._scalar(_COUNT, f"element type of {key}")
        count = self._count(f"length of {key}", MAX_ELEMENTS)
        if kind == _TEXT:
            self._check_room(count * _LENGTH.size, f"{key}, {count} texts")
            return [self._text(f"{key}[{index}]", MAX_TEXT_BYTES) for index in range(count)]
        if kind not in _CODES:
            raise self._error(f"element type of {key}", kind, "must be of numbers or text; arrays cannot be nested")
        dtype = np.dtype("<" + _CODES[kind])
        return np.frombuffer(self._take(count * dtype.itemsize, key), dtype)

    def _number(self, key: str, kind: int) -> Any:
        value = self._scalar(_SCALARS[kind], key)
        if kind != _TRUTH:
            return value
        if value > 1:
            raise self._error(key, value, "a truth value must be 0 or 1")
        return bool(value)

    def _tensor(self, index: int) -> tuple[str, GGUFTensor]:
        """The table's entry, first_byte being counted from where the numbers begin."""
        name = self._text(f"name of tensor {index}", MAX_NAME_BYTES)
        if not name:
            raise self._error(f"name of tensor {index}", name, "must not be empty")
        shown = repr(name)[1:-1]
        num_dimensions = self._scalar(_COUNT, f"dimensions of {shown}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"dimensions of {shown}", num_dimensions, f"must lie in [1, {MAX_DIMENSIONS}]")
        innermost_first = [self._scalar(_LENGTH, f"shape of {shown}") for _ in range(num_dimensions)]
        shape = tuple(reversed(innermost_first))
        if min(shape) < 1 or math.prod(shape) > 1 << 48:
            raise self._error(f"shape of {shown}", list(shape), f"must hold between 1 and {1 << 48} numbers")
        type_name = self._type_name(shown, self._scalar(_COUNT, f"type of {shown}"))
        block_size, _ = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
        if shape[-1] % block_size:
            raise self._error(f"shape of {shown}", list(shape), f"{type_name} has rows of whole blocks of {block_size}")
        return name, GGUFTensor(type_name, shape, self._scalar(_LENGTH, f"offset of {shown}"))

    def _type_name(self, tensor: str, type_id: int) -> str:
        known = {member.value: member.name for member in GGMLQuantizationType}
        if known.get(type_id) not in TYPES:
            value = f"{type_id} ({known[type_id]})" if type_id in known else type_id
            raise CheckpointError(f"{self._path}: type of {tensor} = {value}: must be one of {', '.join(TYPES)}")
        return known[type_id]

    def _placed(self, found: list[tuple[str, GGUFTensor]], alignment: int) -> dict[str, GGUFTensor]:
        """Offsets must follow each other without gaps, and fill the file: a wrong count shifts them."""
        first_byte = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        expected = end = 0
        for name, tensor in found:
            shown = repr(name)[1:-1]
            if name in tensors:
                raise self._error("tensor", name, "occurs twice")
            if tensor.first_byte != expected:
                raise self._error(f"offset of {shown}", tensor.first_byte, f"must be {expected}, after the last one")
            end = first_byte + expected + tensor.num_bytes
            if end > self._size:
                raise self._error(f"end of {shown}", end, f"the file ends at {self._size}")
            tensors[name] = tensor._replace(first_byte=first_byte + expected)
            expected = -(-(end - first_byte) // alignment) * alignment
        if tensors and self._size - end >= alignment:
            raise self._error("size", self._size, f"its last tensor ends at {end}")
        return tensors

    def _count(self, what: str, limit: int) -> int:
        value = self._scalar(_LENGTH, what)
        if value > limit:
            raise self._error(what, value, f"must be at most {limit}")
        return value

    def _text(self, what: str, limit: int) -> str:
        num_bytes = self._count(f"length of {what}", limit)
        raw = self._take(num_bytes, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(what, raw[:40], f"must be UTF-8 ({error.reason})") from None

    def _scalar(self, layout: struct.Struct, what: str) -> Any:
        return layout.unpack(self._take(layout.size, what))[0]

    def _take(self, num_bytes: int, what: str) -> bytes:
        self._check_room(num_bytes, what)
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def _check_room(self, num_bytes: int, what: str) -> None:
        end, limit = self._at + num_bytes, min(self._size, MAX_HEAD_BYTES)
        if end > limit:
            raise self._error(f"end of {what}", end, f"the head must end by byte {limit}")

    def _error(self, field: str, value: object, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {field} = {value!r:.120}: {reason}")


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    """Bytes that every tensor's offset is a multiple of."""
    value = metadata.get(ALIGNMENT, 32)
    if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise CheckpointError(f"{path}: {ALIGNMENT} = {value!r:.120}: must be a power of two up to {MAX_ALIGNMENT}")
    return value
