"""One GGUF file: its metadata, its table of tensors, rows as it stores them, mapped, and what they stand for.

Nothing in a file is trusted: every count, length, type and offset is checked before it is used, so that a damaged file
costs one error and no memory. Quantised rows are dequantised some at a time, when a tensor is asked for. Knows the
layout; nothing of models or tokenizers.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from faser_backend.engines.arrays import BFLOAT16, first_not_finite
from faser_backend.engines.checkpoint_base import CheckpointError
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

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
SCALES = "F16"  # the format that the scales of all quantised types have
NUMBERS_AT_ONCE = 1 << 20
BLOCK = 32  # inputs
Q4_ZERO = 8  # the number of Q4_0 that stands for 0
HALF_BYTES = 2

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
    """Everything that a file says before its numbers begin."""

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
        """The numbers that rows of a tensor stand for: as they are stored, or float32 where they are quantised.

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


def groups_of(
    blocks: np.ndarray, stored_type: str, weight_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Blocks as the integers that products of runtime "llvm" read, without a rounding.

    Bytes of blocks [num_outputs, row_bytes] -> numbers, scales and minimums as layouts.store_groups has
    them: [num_inputs, num_outputs], [num_inputs / 32, num_outputs], and likewise for int4 (None for int8).

    int8 takes Q8_0 and Q4_0, int4 takes Q4_0 and Q4_1. Nothing is checked but that: a scale may not be finite.
    """
    num_scales = 2 if stored_type == "Q4_1" else 1
    num_bytes = BLOCK if stored_type == "Q8_0" else BLOCK // 2
    grouped = blocks.reshape(len(blocks), -1, num_scales * HALF_BYTES + num_bytes)  # [out, groups, block bytes]
    halves = np.ascontiguousarray(grouped[..., : num_scales * HALF_BYTES]).view(np.float16)
    stored, scales = grouped[..., num_scales * HALF_BYTES :], halves[..., 0]
    if (stored_type, weight_format) == ("Q8_0", "int8"):
        return _by_inputs(stored.view(np.int8)), scales.T, None
    assert stored_type.startswith("Q4_"), f"{weight_format} does not hold {stored_type}"
    numbers = _by_inputs(np.concatenate([stored & 15, stored >> 4], axis=-1))
    if (stored_type, weight_format) == ("Q4_0", "int8"):
        return numbers.astype(np.int8) - np.int8(Q4_ZERO), scales.T, None
    assert weight_format == "int4", f"{weight_format} does not hold {stored_type}"
    if stored_type == "Q4_1":
        return numbers, scales.T, halves[..., 1].T
    with np.errstate(over="ignore"):  # infinite above 8188, as a power of two changes no half but so
        return numbers, scales.T, (scales * np.float16(-Q4_ZERO)).T


def _by_inputs(numbers: np.ndarray) -> np.ndarray:
    """[num_outputs, groups, BLOCK] -> [num_inputs, num_outputs]."""
    return numbers.reshape(len(numbers), -1).T
