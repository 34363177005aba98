"""The parts of `tensorrt` and `tensorrt.plugin` that the plugin's registration calls; dimensions are functions.

Full TensorRT cannot be installed where tests run. This fake records registrations, and evaluates dimensions for a
call's sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from enum import Enum
from inspect import signature
from types import ModuleType
from typing import Any

from faser_backend.plugins.tensorrt_contract import DimensionOps

Sizes = Mapping[str, int]


WHOLE_NUMBERS = DimensionOps(int, min, max, lambda a, b: -(-a // b))


class DataType(Enum):
    FLOAT = 0
    HALF = 1
    BF16 = 2
    INT32 = 3
    INT64 = 4


class ShapeExpr:
    """A dimension: a number, the name of a call's size, or an expression of others."""

    def __init__(self, value: int | str | ShapeExpr | Callable[[Sizes], int]) -> None:
        self._value = value

    def at(self, sizes: Sizes) -> int:
        value = self._value
        if isinstance(value, ShapeExpr):
            return value.at(sizes)
        return value if isinstance(value, int) else sizes[value] if isinstance(value, str) else value(sizes)

    def __add__(self, other: Any) -> ShapeExpr:
        return _combined(lambda a, b: a + b, self, other)

    def __mul__(self, other: Any) -> ShapeExpr:
        return _combined(lambda a, b: a * b, self, other)

    def __floordiv__(self, other: Any) -> ShapeExpr:
        return _combined(lambda a, b: a // b, self, other)


class TensorDesc:
    def __init__(self, shape: tuple[Any, ...], dtype: DataType, aliased: TensorDesc | None = None) -> None:
        self.shape_expr = tuple(ShapeExpr(size) for size in shape)
        self.dtype = dtype
        self.source = aliased

    def like(self) -> TensorDesc:
        return TensorDesc(self.shape_expr, self.dtype)

    def aliased(self) -> TensorDesc:
        return TensorDesc(self.shape_expr, self.dtype, self)

    def shape_at(self, sizes: Sizes) -> list[int]:
        return [size.at(sizes) for size in self.shape_expr]


class KernelLaunchParams:
    def __init__(self) -> None:
        self.grid_x = self.grid_y = self.grid_z = self.block_x = self.block_y = self.block_z = 1
        self.shared_mem = 0


class SymIntExprs(list):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class FakeTensorRt:
    """A fake module. `functions`: each op's description and implementation."""

    def __init__(self) -> None:
        self.functions: dict[str, dict[str, Callable[..., Any]]] = {}
        self.module, self.plugin = ModuleType("fake_tensorrt"), ModuleType("fake_tensorrt.plugin")
        vars(self.module).update(float32=DataType.FLOAT, plugin=self.plugin)
        vars(self.plugin).update(
            TensorDesc=TensorDesc,
            ShapeExpr=ShapeExpr,
            SymInt32=ShapeExpr,
            SymIntExprs=SymIntExprs,
            KernelLaunchParams=KernelLaunchParams,
            min=lambda a, b: _combined(min, a, b),
            max=lambda a, b: _combined(max, a, b),
            cdiv=lambda a, b: _combined(lambda x, y: -(-x // y), a, b),
            from_shape_expr=TensorDesc,
            register=lambda op: self._recorder(op, "describe"),
            aot_impl=lambda op: self._recorder(op, "implement"),
        )
        sys.modules |= {"fake_tensorrt": self.module, "fake_tensorrt.plugin": self.plugin}

    def _recorder(self, op: str, role: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def record(function: Callable[..., Any]) -> Callable[..., Any]:
            known = self.functions.setdefault(op, {})
            assert role not in known, f"{op} is defined twice"
            assert signature(function).return_annotation is not None
            known[role] = function
            return function

        return record


def _combined(operation: Callable[[int, int], int], a: Any, b: Any) -> ShapeExpr:
    left, right = ShapeExpr(a), ShapeExpr(b)
    return ShapeExpr(lambda sizes: operation(left.at(sizes), right.at(sizes)))
