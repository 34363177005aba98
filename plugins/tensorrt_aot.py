"""The attention kernels as quickly deployable TensorRT plugins, compiled ahead of time into the engine.

Such an engine runs without Python. TensorRT launches one kernel per plugin, so there are two, `faser::AttendSplits` and
`faser::CombineSplits`. It reads names and types from the signatures of two functions per plugin, made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any

from faser_backend.plugins.compile import WARP_SIZE, Compiled
from faser_backend.plugins.tensorrt_contract import (
    ATTEND_OP,
    ATTENTION_INPUTS,
    COMBINE_INPUTS,
    COMBINE_OP,
    FLOAT_DTYPES,
    GEOMETRY_FIELDS,
    NAMESPACE,
    DimensionOps,
    Geometry,
    Launch,
    attend_launch,
    combine_launch,
    part_rows,
)
from faser_backend.plugins.tensorrt_kernels import compile_attend, compile_combine

# The limit that needs no permission; TensorRT does not document that it raises it for a plugin's kernel.
MAX_SHARED_BYTES = 48 * 1024


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
