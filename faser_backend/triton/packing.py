"""Values <-> bytes that cannot execute: MessagePack, read back against the types that the reader expects.

A dataclass travels as a map of the fields that differ from their defaults, an array as {dtype, shape, bytes}. Reading
refuses what a type does not have: an unknown field, a value of another type, an array whose bytes do not fill it.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from faser_backend.core.errors import ErrorCode, FaserError

T = TypeVar("T")
_Reader = Callable[[Any, str], Any]  # (plain value, name of its place) -> value
ARRAY_TYPES = frozenset({"bool", "int32", "int64", "float32"})


class PackingError(FaserError):
    """Bytes from another process are not what they should be, or a value cannot be sent."""

    code = ErrorCode.INTERNAL


def pack(value: Any) -> bytes:
    """Raises PackingError for what is no plain data, such as a compiled grammar."""
    try:
        return bytes(msgpack.packb(value, default=_plain) or b"")
    except (TypeError, ValueError, OverflowError) as error:
        raise PackingError(f"a {type(value).__name__} cannot be sent: {error}") from None


def unpack(kind: type[T], data: bytes | bytearray) -> T:
    """The value of dataclass `kind` in data. Raises PackingError naming the field, its value and what it must be."""
    try:
        plain = msgpack.unpackb(data, strict_map_key=False)
    except Exception as error:  # the library raises a dozen classes, ValueError and plain Exception among them
        reason = str(error) or type(error).__name__
        raise PackingError(f"{kind.__name__}: {len(data)} bytes that are no MessagePack ({reason})") from None
    return _reader(kind)(plain, kind.__name__)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if str(value.dtype) not in ARRAY_TYPES:
            raise TypeError(f"an array of {value.dtype}")
        return {"dtype": str(value.dtype), "shape": value.shape, "bytes": np.ascontiguousarray(value).tobytes()}
    if is_dataclass(value) and not isinstance(value, type):
        pairs = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: item for field, item in pairs if not _is_same(item, field.default)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no plain data")


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and type(value) in (int, float, str) and value == default)


@cache
def _reader(hint: Any) -> _Reader:
    """Returns a reader of plain values of one type. Made once per type: outputs come with every step."""
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return partial(_read_enum, hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass_reader(hint)
    make = _GENERIC.get(get_origin(hint))
    return _read_nothing if make is None else make(*get_args(hint))


def _refuse(name: str, plain: Any, limit: str) -> PackingError:
    shown = repr(plain)
    return PackingError(f"{name} = {shown if len(shown) <= 80 else shown[:77] + '...'}: {limit}")


def _read_exact(kind: type, plain: Any, name: str) -> Any:
    if type(plain) is not kind:  # True is no integer here
        raise _refuse(name, plain, f"must be of type {kind.__name__}")
    return plain


def _read_float(plain: Any, name: str) -> float:
    if type(plain) is not float and type(plain) is not int:
        raise _refuse(name, plain, "must be a number")
    return plain


def _read_nothing(plain: Any, name: str) -> None:
    raise _refuse(name, plain, "must be left out: it does not travel")


def _read_array(plain: Any, name: str) -> np.ndarray:
    if type(plain) is not dict or plain.keys() != {"dtype", "shape", "bytes"}:
        raise _refuse(name, plain, "must be an array: dtype, shape and bytes")
    kind, shape, data = plain["dtype"], plain["shape"], plain["bytes"]
    if kind not in ARRAY_TYPES:
        raise _refuse(f"{name}.dtype", kind, f"must be one of {', '.join(sorted(ARRAY_TYPES))}")
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 8:
        raise _refuse(f"{name}.shape", shape, "must list at most 8 sizes")
    if type(data) is not bytes or len(data) != math.prod(shape) * np.dtype(kind).itemsize:
        raise _refuse(f"{name}.bytes", data, f"must be the bytes of {shape} {kind}")
    return np.frombuffer(data, kind).reshape(shape)


def _read_path(plain: Any, name: str) -> Path:
    return Path(_read_exact(str, plain, name))


def _optional_reader(*arguments: Any) -> _Reader:
    (hint,) = (each for each in arguments if each is not type(None))
    reader = _reader(hint)
    return lambda plain, name: None if plain is None else reader(plain, name)


def _literal_reader(*allowed: Any) -> _Reader:
    def read(plain: Any, name: str) -> Any:
        if plain not in allowed:
            raise _refuse(name, plain, f"must be one of {', '.join(map(str, allowed))}")
        return plain

    return read


def _read_enum(kind: type[Enum], plain: Any, name: str) -> Enum:
    try:
        return kind(plain)
    except ValueError:
        raise _refuse(name, plain, f"must be one of {', '.join(str(each.value) for each in kind)}") from None


def _sequence_reader(kind: type, hint: Any, *_: Any) -> _Reader:
    reader = _reader(hint)

    def read(plain: Any, name: str) -> Any:
        if type(plain) is not list:
            raise _refuse(name, plain, "must be a list")
        if hint is int and all(type(item) is int for item in plain):  # token ids: most of what there is
            return plain if kind is list else tuple(plain)
        return kind(reader(item, name) for item in plain)

    return read


def _map_reader(key_hint: Any, value_hint: Any) -> _Reader:
    read_key, read_value = _reader(key_hint), _reader(value_hint)

    def read(plain: Any, name: str) -> dict[Any, Any]:
        if type(plain) is not dict:
            raise _refuse(name, plain, "must be a map")
        return {read_key(key, name): read_value(value, f"{name}[{key!r}]") for key, value in plain.items()}

    return read


def _dataclass_reader(kind: type) -> _Reader:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]

    def read(plain: Any, name: str) -> Any:
        if type(plain) is not dict:
            raise _refuse(name, plain, f"must be a map of the fields of {kind.__name__}")
        for field in plain.keys() - readers.keys():
            raise _refuse(f"{name}.{field}", plain[field], f"{kind.__name__} has no such field")
        for field in needed:
            if field not in plain:
                raise _refuse(f"{name}.{field}", None, "is missing")
        return kind(**{field: readers[field](value, f"{name}.{field}") for field, value in plain.items()})

    return read


_SIMPLE: dict[Any, _Reader] = {
    **{kind: partial(_read_exact, kind) for kind in (int, str, bool)},
    float: _read_float,
    np.ndarray: _read_array,
    Path: _read_path,
}
_GENERIC: dict[Any, Callable[..., _Reader]] = {  # types of which none is here do not travel
    Union: _optional_reader,
    types.UnionType: _optional_reader,
    Literal: _literal_reader,
    list: partial(_sequence_reader, list),
    tuple: partial(_sequence_reader, tuple),
    dict: _map_reader,
    Mapping: _map_reader,
}
