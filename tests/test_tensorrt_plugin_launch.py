"""Launching a compiled kernel through the driver: what is called, in which order, with which arguments."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from plugins.compile import Compiled
from plugins.cubin import CudaError, LoadedKernel, packed_arguments


def compiled(shared_bytes: int = 1000) -> Compiled:
    return Compiled(
        name="kernel",
        parameters=(("x", "*bf16"), ("count", "i32"), ("y", "*fp32")),
        ptx="",
        cubin=b"\x7fELF",
        shared_bytes=shared_bytes,
        num_warps=4,
        capability=90,
        num_registers=32,
        spill_bytes=0,
    )


class RecordingDriver:
    """Answers every call with success, but for the one named `failing`."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple] = []
        self.failing = failing

    def __getattr__(self, name: str):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return (int(name == self.failing), f"result of {name}")

        return call


def test_a_kernel_is_loaded_once_and_launched_on_the_given_stream() -> None:
    driver = RecordingDriver()
    kernel = LoadedKernel(compiled(), driver)
    assert [call[0] for call in driver.calls] == ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"]
    assert driver.calls[0][1] == b"\x7fELF" and driver.calls[1][2] == b"kernel"
    driver.calls.clear()
    kernel.launch((5, 2, 3), 99, (4096, 7, 8192))
    arguments = ((4096, 7, 8192), (ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p))
    function = "result of cuKernelGetFunction"
    assert driver.calls == [("cuLaunchKernel", function, 5, 2, 3, 128, 1, 1, 1000, 99, arguments, 0)]
    kernel.close()
    kernel.close()
    assert [call[0] for call in driver.calls[1:]] == ["cuLibraryUnload"]


def test_more_shared_memory_than_usual_is_asked_for() -> None:
    driver = RecordingDriver()
    LoadedKernel(compiled(shared_bytes=90_000), driver)
    assert driver.calls[-1] == ("cuFuncSetAttribute", "result of cuKernelGetFunction", "shared", 90_000)


@pytest.mark.parametrize("failing", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"])
def test_a_refusal_names_the_call_and_the_kernel(failing: str) -> None:
    with pytest.raises(CudaError, match=f"{failing} of kernel: 1"):
        LoadedKernel(compiled(), RecordingDriver(failing))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, 2), "kernel: 2 arguments, its parameters are 3"),
        ((1, 1 << 31, 2), "kernel: count = 2147483648: must be an i32"),
        ((-1, 2, 2), "kernel: x = -1: must be an address"),
    ],
)
def test_arguments_that_are_not_the_kernels_are_refused(values: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_arguments(compiled(), values)
