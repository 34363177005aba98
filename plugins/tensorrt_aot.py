# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""The attention kernels as quickly deployable TensorRT plugins, compiled ahead of time into the engine.

Such an engine runs without Python. TensorRT launches one kernel per plugin, so there are two, `faser::AttendSplits` and
`faser::CombineSplits`. Their bodies are in `pruned_chunk_attention` and `split_combine`; here they get the parameters
that TensorRT passes: inputs, integers, outputs, in this order. TensorRT reads names and types from the signatures of
two functions per plugin, made here.

Compiling kernels to PTX needs no GPU. The compiler's two scratch pointers at the end of every parameter list, which no
kernel of this package uses, are removed: a launch of the result passes exactly `parameters`, in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from faser_backend.plugins.attention_config import MAX_SPLITS, PART_TOKENS, LaunchConfig, padded_head_dim
from faser_backend.plugins.pruned_chunk_attention import pruned_chunk_attention_kernel
from faser_backend.plugins.split_combine import NUM_WARPS, combine_splits_kernel
from faser_backend.plugins.tensorrt_contract import (
    ATTEND_OP,
    ATTENTION_INPUTS,
    COMBINE_INPUTS,
    COMBINE_OP,
    FLOAT_DTYPES,
    GEOMETRY_FIELDS,
    INDEX_INPUTS,
    NAMESPACE,
    DimensionOps,
    Geometry,
    Launch,
    attend_launch,
    combine_launch,
    part_rows,
)

WARP_SIZE = 32
OLDEST_PTX = 84  # that drivers for CUDA 12.4 take, the oldest that are supported
PTX_OF_NEWER_GPUS = {100: 86, 103: 88, 120: 87, 121: 88}  # the first version that knows them
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
    ptx_version = PTX_OF_NEWER_GPUS.get(capability, OLDEST_PTX)  # the compiler's own is its newest
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


# -- the kernels ------------------------------------------------------------------------------------------------------
# The limit that needs no permission; TensorRT does not document that it raises it for a plugin's kernel.
MAX_SHARED_BYTES = 48 * 1024


@triton.jit
def attend_splits_kernel(
    q, k_new, v_new, k_pool, v_pool, block_table, cu_rows, context_lens, slot_mapping,
    num_rows, num_blocks, num_sequences,
    num_columns,  # of block_table
    num_splits, mixed_parts, stat_parts,
    k_pool_out,  # the same as k_pool: TensorRT passes every output
    v_pool_out,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PART_TOKENS: tl.constexpr, ALIGNMENT: tl.constexpr, MOST_PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: as the body's. Tensors of TensorRT are contiguous."""
    pruned_chunk_attention_kernel(
        q, k_new, v_new, k_pool, v_pool, block_table, cu_rows, context_lens, slot_mapping, None,
        NUM_KV_HEADS * GROUP * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM,
        num_blocks, num_columns, num_sequences, num_rows, num_splits, None, mixed_parts, stat_parts,
        HEAD_DIM, GROUP, KV_BLOCK_SIZE, SCALE_LOG2, BLOCK_M, BLOCK_N, BLOCK_D, PART_TOKENS, ALIGNMENT, NUM_KV_HEADS,
        MOST_PARTS, 32, True,
    )  # fmt: skip


@triton.jit
def combine_parts_kernel(
    mixed_parts,
    stat_parts,
    q,  # only its shape is used, as of block_table
    block_table,
    cu_rows,
    num_sequences,
    num_splits,
    attended,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (T, H)."""
    combine_splits_kernel(
        mixed_parts, stat_parts, cu_rows, num_sequences, attended, num_splits, HEAD_DIM, BLOCK_S, BLOCK_D
    )


def attend_constants(geometry: Geometry, tiles: LaunchConfig) -> dict[str, int | float]:
    """Returns the constants of the first kernel."""
    names = ("num_kv_heads", "group", "head_dim", "kv_block_size")
    constants = tiles.constants(**{name: getattr(geometry, name) for name in names})
    return constants | {"PART_TOKENS": PART_TOKENS, "ALIGNMENT": 16 if geometry.head_dim % 8 == 0 else 1}


def combine_constants(geometry: Geometry) -> dict[str, int]:
    """Returns the constants of the second kernel."""
    return {
        "HEAD_DIM": geometry.head_dim,
        "BLOCK_S": 1 << (MAX_SPLITS - 1).bit_length(),
        "BLOCK_D": padded_head_dim(geometry.head_dim),
    }


@cache
def compile_attend(geometry: Geometry, dtype: str, max_shared_bytes: int | None = None) -> Compiled:
    """Compiles the first kernel for a type, "fp32", "fp16" or "bf16". All layers of a model share it.

    max_shared_bytes: the launcher's limit. To fit, pipeline stages are reduced first, then tokens per iteration.
    """
    tiles = geometry.launch_config(dtype)
    compiled = _compile_attend(geometry, dtype, tiles)
    while max_shared_bytes is not None and compiled.shared_bytes > max_shared_bytes:
        if tiles.num_stages > 2:
            tiles = tiles._replace(num_stages=tiles.num_stages - 1)
        elif tiles.block_n > 16:
            tiles = tiles._replace(block_n=tiles.block_n // 2)
        else:
            raise ValueError(f"head_dim = {geometry.head_dim}: needs more shared memory than {max_shared_bytes} bytes")
        compiled = _compile_attend(geometry, dtype, tiles)
    return compiled


def _compile_attend(geometry: Geometry, dtype: str, tiles: LaunchConfig) -> Compiled:
    floats = f"*{dtype}:16"  # TensorRT aligns tensors to 256 bytes
    signature = {name: "*i32:16" if name in INDEX_INPUTS else floats for name in ATTENTION_INPUTS}
    signature |= dict.fromkeys(("num_rows", "num_blocks", "num_sequences", "num_columns", "num_splits"), "i32")
    signature |= {"mixed_parts": "*fp32:16", "stat_parts": "*fp32:16", "k_pool_out": floats, "v_pool_out": floats}
    return compile_kernel(
        attend_splits_kernel,
        signature,
        attend_constants(geometry, tiles),
        geometry.capability,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@cache
def compile_combine(geometry: Geometry, dtype: str) -> Compiled:
    """Compiles the second kernel; `dtype` is the type of queries and results."""
    floats = f"*{dtype}:16"
    signature = {"mixed_parts": "*fp32:16", "stat_parts": "*fp32:16", "q": floats}
    signature |= {"block_table": "*i32:16", "cu_rows": "*i32:16", "num_sequences": "i32", "num_splits": "i32"}
    signature |= {"attended": floats}
    constants = combine_constants(geometry)
    return compile_kernel(combine_parts_kernel, signature, constants, geometry.capability, num_warps=NUM_WARPS)


# -- the plugins ------------------------------------------------------------------------------------------------------
@cache
def register_aot_plugins(module_name: str = "tensorrt") -> None:
    """Registers all ops with the ONNX parser of a TensorRT that has_plugins. Repeated calls do nothing."""
    import_module("numpy.typing")  # tensorrt.plugin uses it and imports only numpy
    module, plugin = import_module(module_name), import_module(f"{module_name}.plugin")
    _register(
        plugin,
        ATTEND_OP,
        ATTENTION_INPUTS,
        outputs=tuple[(plugin.TensorDesc,) * 4],
        describe=lambda tensors, geometry: describe_attend(module, plugin, tensors, geometry),
        implement=lambda tensors, geometry: implement_attend(plugin, tensors, geometry),
    )
    _register(
        plugin,
        COMBINE_OP,
        COMBINE_INPUTS,
        outputs=plugin.TensorDesc,
        describe=lambda tensors, geometry: tensors["q"].like(),
        implement=lambda tensors, geometry: implement_combine(plugin, tensors, geometry),
    )


def describe_attend(module: Any, plugin: Any, tensors: dict[str, Any], geometry: Geometry) -> tuple[Any, ...]:
    """Describes the outputs of the first op: parts of the result, and the pools."""
    rows = part_rows(tensors["q"].shape_expr[0])
    mixed = plugin.from_shape_expr((rows, geometry.num_heads, geometry.head_dim), module.float32)
    stat = plugin.from_shape_expr((rows, geometry.num_heads, 2), module.float32)
    return mixed, stat, tensors["k_pool"].aliased(), tensors["v_pool"].aliased()


def implement_attend(plugin: Any, tensors: dict[str, Any], geometry: Geometry) -> tuple[Any, ...]:
    """Returns name, PTX, grid and scalar arguments of the first kernel."""
    dtype = FLOAT_DTYPES[tensors["q"].dtype.name]
    compiled = compile_attend(geometry, dtype, MAX_SHARED_BYTES)
    num_rows, table = tensors["q"].shape_expr[0], tuple(tensors["block_table"].shape_expr)
    num_blocks = tensors["k_pool"].shape_expr[1]
    ops = _symbolic_ops(plugin)
    launch = attend_launch(geometry, geometry.launch_config(dtype), ops, num_rows, table, num_blocks=num_blocks)
    return compiled.name, compiled.ptx, *_launch_params(plugin, compiled, launch)


def implement_combine(plugin: Any, tensors: dict[str, Any], geometry: Geometry) -> tuple[Any, ...]:
    """Returns name, PTX, grid and scalar arguments of the second kernel."""
    dtype = FLOAT_DTYPES[tensors["q"].dtype.name]
    compiled = compile_combine(geometry, dtype)
    num_rows, table = tensors["q"].shape_expr[0], tuple(tensors["block_table"].shape_expr)
    launch = combine_launch(geometry, geometry.launch_config(dtype), _symbolic_ops(plugin), num_rows, table)
    return compiled.name, compiled.ptx, *_launch_params(plugin, compiled, launch)


def _register(
    plugin: Any,
    op: str,
    inputs: Sequence[str],
    *,
    outputs: Any,
    describe: Callable[[dict[str, Any], Geometry], Any],
    implement: Callable[[dict[str, Any], Geometry], tuple[Any, ...]],
) -> None:
    tensor, num_inputs, num_values = plugin.TensorDesc, len(inputs), len(inputs) + len(GEOMETRY_FIELDS)
    declared = {**dict.fromkeys(inputs, tensor), **dict.fromkeys(GEOMETRY_FIELDS, int)}
    passed = {**declared, "outputs": tuple[tensor], "tactic": int}
    kernel = tuple[str | bytes, str | bytes, plugin.KernelLaunchParams, plugin.SymIntExprs]

    def described(*tensors: Any, **attributes: int) -> Any:
        return describe(dict(zip(inputs, tensors, strict=True)), Geometry.from_fields(attributes))

    def implemented(*values: Any) -> tuple[Any, ...]:
        attributes = dict(zip(GEOMETRY_FIELDS, values[num_inputs:num_values], strict=True))
        return implement(dict(zip(inputs, values[:num_inputs], strict=True)), Geometry.from_fields(attributes))

    _sign(described, declared, outputs)
    _sign(implemented, passed, kernel)
    plugin.register(f"{NAMESPACE}::{op}")(described)
    plugin.aot_impl(f"{NAMESPACE}::{op}")(implemented)


def _sign(function: Any, parameters: dict[str, Any], returns: Any) -> None:
    """Sets the signature that TensorRT checks and reads types from."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    named = [Parameter(name, kind, annotation=annotation) for name, annotation in parameters.items()]
    function.__signature__ = Signature(named, return_annotation=returns)


def _symbolic_ops(plugin: Any) -> DimensionOps:
    """Returns operations on dimensions, as expressions that TensorRT evaluates for the shapes of each call."""
    return DimensionOps(plugin.ShapeExpr, plugin.min, plugin.max, plugin.cdiv)


def _launch_params(plugin: Any, compiled: Compiled, launch: Launch) -> tuple[Any, Any]:
    params = plugin.KernelLaunchParams()
    params.grid_x, params.grid_y, params.grid_z = launch.grid
    params.block_x = compiled.num_warps * WARP_SIZE
    params.shared_mem = compiled.shared_bytes
    scalars = plugin.SymIntExprs(len(launch.scalars))
    for index, scalar in enumerate(launch.scalars):
        scalars[index] = plugin.SymInt32(scalar)
    return params, scalars
