"""`faser::PrunedChunkAttention` as one TensorRT plugin in Python, for versions that bake no kernel into engines.

Both kernels are launched from `enqueue`, on the stream that TensorRT gives, in its workspace. They are compiled
and loaded when a context learns its shapes, never in enqueue. While an engine is built nothing is launched:
TensorRT times a layer on contents that mean nothing. Such an engine needs this package wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from plugins.compile import LoadedKernel
from plugins.tensorrt_contract import (
    ATTENTION_INPUTS,
    ATTENTION_OP,
    ATTENTION_OUTPUTS,
    FLOAT_DTYPES,
    GEOMETRY_FIELDS,
    NAMESPACE,
    VERSION,
    WHOLE_NUMBERS,
    Geometry,
    attend_launch,
    check_shapes,
    combine_launch,
    workspace_bytes,
)
from plugins.tensorrt_kernels import compile_attend, compile_combine

Q, K_POOL, V_POOL, BLOCK_TABLE, CU_ROWS = map(
    ATTENTION_INPUTS.index, ("q", "k_pool", "v_pool", "block_table", "cu_rows")
)
OUTPUT_SOURCES = (Q, K_POOL, V_POOL)  # inputs whose shapes and types the outputs have
ALIASES = (-1, K_POOL, V_POOL)  # inputs whose memory the outputs share


class AttentionKernels:
    """Both kernels for one geometry and type, in the current CUDA context."""

    def __init__(self, geometry: Geometry, dtype: str, load: Callable[[Any], Any] = LoadedKernel) -> None:
        self._geometry = geometry
        self._config = geometry.launch_config(dtype)
        self._attend = load(compile_attend(geometry, dtype))
        self._combine = load(compile_combine(geometry, dtype))

    def launch(
        self,
        shapes: Sequence[Sequence[int]],
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        workspace: int,
        stream: int,
    ) -> None:
        """Queues both. shapes, inputs, outputs: of the op's tensors, the latter addresses."""
        num_rows, table_shape, num_blocks = shapes[Q][0], tuple(shapes[BLOCK_TABLE]), shapes[K_POOL][1]
        mixed_parts, stat_parts = workspace, workspace + workspace_bytes(self._geometry, num_rows)[0]
        attended, *pools_out = outputs
        grid, scalars = attend_launch(
            self._geometry, self._config, WHOLE_NUMBERS, num_rows, table_shape, num_blocks=num_blocks
        )
        self._attend.launch(grid, stream, (*inputs, *scalars, mixed_parts, stat_parts, *pools_out))
        grid, scalars = combine_launch(self._geometry, self._config, WHOLE_NUMBERS, num_rows, table_shape)
        shaped = (mixed_parts, stat_parts, inputs[Q], inputs[BLOCK_TABLE], inputs[CU_ROWS])
        self._combine.launch(grid, stream, (*shaped, *scalars, attended))


class Fields:
    """Plugin fields of int64 values. They point into arrays that nobody else keeps alive."""

    def __init__(self, module: Any, values: Mapping[str, Sequence[int]]) -> None:
        self.arrays = {name: np.array(numbers, np.int64) for name, numbers in values.items()}
        kind = module.PluginFieldType.INT64
        self.collection = module.PluginFieldCollection(
            [module.PluginField(name, array, kind) for name, array in self.arrays.items()]
        )


@cache
def loaded_kernels(geometry: Geometry, dtype: str) -> AttentionKernels:
    """One pair per geometry and type, for all layers and contexts of the process."""
    return AttentionKernels(geometry, dtype)


def register_v3_plugin(module: Any) -> None:
    """Makes the op known to a TensorRT that has_plugins: before a network is parsed or an engine is loaded."""
    registry = module.get_plugin_registry()
    known = {(creator.plugin_namespace, creator.name) for creator in registry.all_creators}  # asking logs an error
    if (NAMESPACE, ATTENTION_OP) not in known:
        registry.register_creator(plugin_classes(module)[1](), NAMESPACE)


class AttentionMethods:
    """The methods that TensorRT calls; plugin_classes joins it with TensorRT's own classes."""

    def __init__(self, module: Any, geometry: Geometry, is_build: bool) -> None:
        self.module = module
        self.geometry = geometry
        self.is_build = is_build
        self.num_outputs = len(ATTENTION_OUTPUTS)
        self.plugin_name, self.plugin_version, self.plugin_namespace = ATTENTION_OP, VERSION, NAMESPACE
        self.timing_cache_id = ""
        self._fields = Fields(module, {name: [value] for name, value in geometry.as_fields().items()})

    def get_capability_interface(self, type: Any) -> Any:
        return self

    def clone(self) -> Any:
        return plugin_classes(self.module)[0](self.geometry, self.is_build)

    def attach_to_context(self, context: Any) -> Any:
        return self.clone()

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        return [input_types[source] for source in OUTPUT_SOURCES]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], exprs: Any) -> list[Any]:
        return [self.module.DimsExprs(inputs[source]) for source in OUTPUT_SOURCES]

    def get_aliased_input(self, output_index: int) -> int:
        return ALIASES[output_index]

    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        """One float type for queries, keys, values and pools; whole numbers for the rest; everything row by row."""
        tensor, dtype = in_out[pos].desc, in_out[pos].desc.type.name
        if tensor.format != self.module.TensorFormat.LINEAR:
            return False
        if BLOCK_TABLE <= pos < num_inputs:
            return dtype == "INT32"
        return dtype in FLOAT_DTYPES and dtype == in_out[Q].desc.type.name

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        check_shapes(self.geometry, [tuple(tensor.desc.dims) for tensor in inputs])

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return sum(workspace_bytes(self.geometry, inputs[Q].max[0]))

    def get_valid_tactics(self) -> list[int]:
        return []

    def set_tactic(self, tactic: int) -> None:
        pass  # there is one way

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        check_shapes(self.geometry, [tuple(tensor.dims) for tensor in inputs])
        if not self.is_build:
            loaded_kernels(self.geometry, FLOAT_DTYPES[inputs[Q].type.name])

    def enqueue(  # noqa: PLR0917
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        if not self.is_build:
            kernels = loaded_kernels(self.geometry, FLOAT_DTYPES[input_desc[Q].type.name])
            shapes = [tuple(tensor.dims) for tensor in input_desc]
            kernels.launch(shapes, inputs, outputs, workspace=workspace, stream=stream)

    def get_fields_to_serialize(self) -> Any:
        return self._fields.collection


@cache
def plugin_classes(module: Any) -> tuple[type, type]:
    """The plugin and its creator, whose base classes are known only once TensorRT is imported."""

    class AttentionPlugin(
        AttentionMethods,
        module.IPluginV3,
        module.IPluginV3OneCore,
        module.IPluginV3OneBuildV2,
        module.IPluginV3OneRuntime,
    ):
        def __init__(self, geometry: Geometry, is_build: bool) -> None:
            for base in AttentionPlugin.__bases__[1:]:
                base.__init__(self)
            AttentionMethods.__init__(self, module, geometry, is_build)

    class AttentionCreator(module.IPluginCreatorV3One):
        def __init__(self) -> None:
            module.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = ATTENTION_OP, VERSION, NAMESPACE
            self._fields = Fields(module, {name: [] for name in GEOMETRY_FIELDS})
            self.field_names = self._fields.collection

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            values = {field.name: int(np.asarray(field.data).reshape(-1)[0]) for field in fields}
            return AttentionPlugin(Geometry.from_fields(values), phase == module.TensorRTPhase.BUILD)

    return AttentionPlugin, AttentionCreator
