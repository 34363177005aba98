"""Launching a compiled kernel through the CUDA driver: loaded once, queued on any stream, nothing else.

For who is not torch: the kernel's arguments are addresses and whole numbers, in the order of its parameters.
Knows nothing of what a kernel computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from plugins.compile import WARP_SIZE, Compiled

DEFAULT_SHARED_BYTES = 48 * 1024  # what a kernel may use without being allowed more
MAX_INT32 = (1 << 31) - 1


class CudaError(RuntimeError):
    """The CUDA driver refused a call; the message names both."""


def packed_arguments(compiled: Compiled, values: Sequence[int]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Values and C types as cuLaunchKernel takes them. Raises ValueError where they are not those of the kernel."""
    if len(values) != len(compiled.parameters):
        raise ValueError(f"{compiled.name}: {len(values)} arguments, its parameters are {len(compiled.parameters)}")
    types = []
    for (name, kind), value in zip(compiled.parameters, values, strict=True):
        is_address = kind.startswith("*")
        if not is_address and kind != "i32":
            raise ValueError(f"{compiled.name}: parameter {name} has type {kind}: only addresses and i32 are passed")
        if value < 0 or (not is_address and value > MAX_INT32):
            raise ValueError(f"{compiled.name}: {name} = {value}: must be {'an address' if is_address else 'an i32'}")
        types.append(ctypes.c_void_p if is_address else ctypes.c_int32)
    return tuple(values), tuple(types)


class LoadedKernel:
    """A kernel in the current CUDA context's device. Loading may wait for the device; launching never does."""

    def __init__(self, compiled: Compiled, driver: Any = None) -> None:
        """driver: cuda.bindings.driver, or what stands in for it. Raises CudaError."""
        self.compiled = compiled
        self._driver = driver or import_module("cuda.bindings.driver")
        self._library = self._call("cuLibraryLoadData", compiled.cubin, [], [], 0, [], [], 0)
        kernel = self._call("cuLibraryGetKernel", self._library, compiled.name.encode())
        # The driver loads lazily, at the latest here: not while a stream is being captured.
        self._function = self._call("cuKernelGetFunction", kernel)
        if compiled.shared_bytes > DEFAULT_SHARED_BYTES:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", self._function, attribute, compiled.shared_bytes)

    def launch(self, grid: tuple[int, int, int], stream: int, values: Sequence[int]) -> None:
        """Queues the kernel on a stream. values: addresses and whole numbers, by the kernel's parameters."""
        arguments = packed_arguments(self.compiled, values)
        threads = (self.compiled.num_warps * WARP_SIZE, 1, 1)
        self._call("cuLaunchKernel", self._function, *grid, *threads, self.compiled.shared_bytes, stream, arguments, 0)

    def close(self) -> None:
        """Unloads the kernel, when the device has done with it."""
        if self._library is not None:
            self._call("cuLibraryUnload", self._library)
            self._library = None

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise CudaError(f"{name} of {self.compiled.name}: {status}")
        return results[0] if results else None
