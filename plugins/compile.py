"""Ahead-of-time compilation of Triton-language kernels to PTX.

No GPU is needed. The compiler's two scratch pointers at the end of every parameter list, which no kernel of this
package uses, are removed: a launch of the result passes exactly `parameters`, in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

WARP_SIZE = 32
OLDEST_PTX = 84  # that drivers for CUDA 12.4 take, the oldest that are supported
PTX_OF_NEWER_GPUS = {10: 86, 12: 87}  # by major capability: the first version that knows them
NUM_SCRATCH_PARAMETERS = 2  # global and profile scratch


@dataclass(frozen=True)
class Compiled:
    """A kernel for one compute capability.

    Launch it with num_warps * 32 threads and `shared_bytes` of dynamic shared memory. Above 48 KiB, the function's
    limit must be raised first.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]  # (name, type such as "*bf16" or "i32"), in launch order
    ptx: str
    shared_bytes: int
    num_warps: int
    capability: int


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    capability: int,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Compiled:
    """Compiles a `triton.jit` function. TRITON_INTERPRET must not be set.

    signature: the type of every parameter that a launch passes; "*bf16:16" or "i32:16" promises that an
    address or a value is a multiple of 16, which 16-byte loads need. constants: all other parameters.
    Raises ValueError if the two do not cover the parameters, or if the kernel needs scratch memory.
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
    ptx_version = PTX_OF_NEWER_GPUS.get(capability // 10, OLDEST_PTX)  # the compiler's own is its newest
    options = {"num_warps": num_warps, "num_stages": num_stages, "ptx_version": ptx_version}
    built = triton.compile(source, target=GPUTarget("cuda", capability, WARP_SIZE), options=options)
    if built.metadata.global_scratch_size or built.metadata.profile_scratch_size:
        raise ValueError(f"{kernel.__name__}: needs scratch memory, which only the compiler's own launcher allocates")
    parameters = tuple((name, source.signature[name]) for name in names if name in signature)
    ptx = without_scratch_parameters(built.asm["ptx"], len(parameters))
    return Compiled(built.metadata.name, parameters, ptx, built.metadata.shared, num_warps, capability)


def without_scratch_parameters(ptx: str, num_parameters: int) -> str:
    """Removes all parameters after the first `num_parameters`. Raises ValueError if the body reads one of them."""
    entry = re.search(r"\.entry\s+(\w+)\s*\(([^)]*)\)", ptx)
    if entry is None:
        raise ValueError("no entry point in the PTX")
    parameters = [line.strip() for line in entry[2].split(",")]
    if len(parameters) != num_parameters + NUM_SCRATCH_PARAMETERS:
        raise ValueError(f"{entry[1]}: {len(parameters)} PTX parameters, expected {num_parameters} and scratch")
    dropped = [parameter.split()[-1] for parameter in parameters[num_parameters:]]
    used = [name for name in dropped if f"[{name}" in ptx]
    if used:
        raise ValueError(f"{entry[1]}: reads {', '.join(used)}, which no launch would pass")
    kept = "\n\t" + ",\n\t".join(parameters[:num_parameters]) + "\n"
    return ptx[: entry.start(2)] + kept + ptx[entry.end(2) :]
