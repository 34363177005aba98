"""Ahead-of-time compilation of Triton-language kernels, for who is not torch: PTX, cubin, and their launch.

No GPU is needed to compile. The compiler ends every kernel's parameter list with two scratch pointers of its own
launcher; kernels that use none (all of this package) are assembled without them, so that a launch of
the result passes exactly `parameters`, in order. Knows nothing of what a kernel computes.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

CAPABILITIES = (80, 90, 120)  # those that the tests compile for
WARP_SIZE = 32
NUM_SCRATCH_PARAMETERS = 2  # global and profile scratch
DEFAULT_SHARED_BYTES = 48 * 1024  # what a kernel may use without being allowed more


@dataclass(frozen=True)
class Compiled:
    """A kernel for one compute capability. Launch with num_warps * 32 threads and `shared_bytes` of dynamic
    shared memory; above 48 KiB that has to be allowed for the function first."""

    name: str
    parameters: tuple[tuple[str, str], ...]  # (name, type such as "*bf16" or "i32"), in launch order
    ptx: str
    cubin: bytes
    shared_bytes: int
    num_warps: int
    capability: int
    num_registers: int  # per thread
    spill_bytes: int  # per thread, stores and loads; 0 where everything stays in registers


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    capability: int,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Compiled:
    """Compiles a `triton.jit` function, without TRITON_INTERPRET in the environment.

    signature: type of every parameter that is passed at launch; "*bf16:16" or "i32:16" promises that an
    address or a value is a multiple of 16, which 16-byte loads need. constants: all other parameters.
    Raises ValueError where the two do not cover the parameters, or where the kernel needs scratch memory.
    """
    names = list(kernel.arg_names)
    if set(signature) & set(constants) or set(signature) | set(constants) != set(names):
        raise ValueError(f"{kernel.__name__}: signature and constants must together name {', '.join(names)}, once each")
    source = ASTSource(
        kernel,
        {name: signature[name].partition(":")[0] if name in signature else "constexpr" for name in names},
        dict(constants),
        {(names.index(n),): [["tt.divisibility", 16]] for n, t in signature.items() if t.endswith(":16")},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, WARP_SIZE), options=options)
    if built.metadata.global_scratch_size or built.metadata.profile_scratch_size:
        raise ValueError(f"{kernel.__name__}: needs scratch memory, which only the compiler's own launcher allocates")
    parameters = tuple((name, source.signature[name]) for name in names if name in signature)
    ptx = without_scratch_parameters(built.asm["ptx"], len(parameters))
    cubin, num_registers, spill_bytes = assemble(ptx, capability)
    shared_bytes, name = built.metadata.shared, built.metadata.name
    return Compiled(name, parameters, ptx, cubin, shared_bytes, num_warps, capability, num_registers, spill_bytes)


def without_scratch_parameters(ptx: str, num_parameters: int) -> str:
    """The same kernel with its first `num_parameters` parameters. Raises ValueError where the body reads another."""
    entry = re.search(r"\.entry\s+(\w+)\s*\(([^)]*)\)", ptx)
    if entry is None:
        raise ValueError("no entry point in the PTX")
    parameters = [line.strip() for line in entry[2].split(",")]
    if len(parameters) != num_parameters + NUM_SCRATCH_PARAMETERS:
        raise ValueError(f"{entry[1]}: {len(parameters)} PTX parameters, expected {num_parameters} and scratch")
    dropped = [parameter.split()[-1] for parameter in parameters[num_parameters:]]
    used = [name for name in dropped if f"[{name}" in ptx]
    if used:
        raise ValueError(f"{entry[1]}: reads {', '.join(used)}, which nobody would pass")
    kept = "\n\t" + ",\n\t".join(parameters[:num_parameters]) + "\n"
    return ptx[: entry.start(2)] + kept + ptx[entry.end(2) :]


def assemble(ptx: str, capability: int) -> tuple[bytes, int, int]:
    """(cubin, registers per thread, bytes spilled per thread) of PTX, by the assembler that comes with the compiler."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        arch = sm_arch_from_capability(capability)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(f"ptxas refused the kernel for {arch}: {done.stderr.strip()}")
        registers = re.search(r"Used (\d+) registers", done.stderr)
        spilled = re.findall(r"(\d+) bytes spill", done.stderr)
        return cubin.read_bytes(), int(registers[1]) if registers else 0, sum(map(int, spilled))


class CudaError(RuntimeError):
    """The CUDA driver refused a call; the message names both."""


class LoadedKernel:
    """A kernel in the current CUDA context's device. Loading may wait for the device; launching never does."""

    def __init__(self, compiled: Compiled, driver: Any = None) -> None:
        """driver: cuda.bindings.driver, or what stands in for it. Raises CudaError."""
        self.compiled = compiled
        kinds = [kind for _, kind in compiled.parameters]
        self._types = tuple(
            ctypes.c_void_p if kind.startswith("*") else {"i32": ctypes.c_int32}[kind] for kind in kinds
        )
        self._driver = driver or import_module("cuda.bindings.driver")
        library = self._call("cuLibraryLoadData", compiled.cubin, [], [], 0, [], [], 0)
        kernel = self._call("cuLibraryGetKernel", library, compiled.name.encode())
        # The driver loads lazily, at the latest here: not while a stream is being captured.
        self._function = self._call("cuKernelGetFunction", kernel)
        if compiled.shared_bytes > DEFAULT_SHARED_BYTES:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", self._function, attribute, compiled.shared_bytes)

    def launch(self, grid: tuple[int, int, int], stream: int, values: Sequence[int]) -> None:
        """Queues the kernel on a stream. values: addresses and whole numbers, by the kernel's parameters. Raises
        ValueError where their number is another."""
        if len(values) != len(self._types):
            raise ValueError(f"{self.compiled.name}: {len(values)} arguments, its parameters are {len(self._types)}")
        threads, arguments = (self.compiled.num_warps * WARP_SIZE, 1, 1), (tuple(values), self._types)
        self._call("cuLaunchKernel", self._function, *grid, *threads, self.compiled.shared_bytes, stream, arguments, 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise CudaError(f"{name} of {self.compiled.name}: {status}")
        return results[0] if results else None
