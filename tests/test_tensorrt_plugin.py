"""The attention plugin without a GPU: its contract in numbers, and both forms of it up to the border of TensorRT.

The form that bakes kernels in is registered with a recording fake, as full TensorRT cannot be installed here; the
other one subclasses the real plugin classes, which the bindings of TensorRT-RTX have too.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest

from plugins.attention_config import MAX_SPLITS, choose_num_splits
from plugins.compile import Compiled, CudaError, LoadedKernel
from plugins.tensorrt_aot import MAX_SHARED_BYTES, register_aot_plugins
from plugins.tensorrt_contract import (
    ATTEND_OUTPUTS,
    ATTENTION_INPUTS,
    ATTENTION_OP,
    ATTENTION_OUTPUTS,
    COMBINE_INPUTS,
    GEOMETRY_FIELDS,
    NAMESPACE,
    VERSION,
    WHOLE_NUMBERS,
    Geometry,
    attend_launch,
    check_shapes,
    num_splits,
    part_rows,
    workspace_bytes,
)
from plugins.tensorrt_import import import_tensorrt
from plugins.tensorrt_kernels import compile_attend, compile_combine
from plugins.tensorrt_v3 import AttentionKernels, loaded_kernels, plugin_classes, register_v3_plugin
from tests.fake_tensorrt_plugin import DataType, FakeTensorRt, TensorDesc

GEOMETRY = Geometry(
    num_heads=8, num_kv_heads=2, head_dim=64, kv_block_size=16, max_rows=256, tile_rows=8, num_sms=132, capability=90
)
SHAPES = [("T", 8, 64), *[("T", 2, 64)] * 2, *[(2, "NB", 16, 64)] * 2, ("B", "MB"), ("B + 1",), ("B",), ("T",)]
SIZES = {"T": 20, "B": 4, "B + 1": 5, "NB": 900, "MB": 64}
FLOATS, INTS = ["BF16"] * 5, ["INT32"] * 4


def test_attributes_go_round_and_are_checked() -> None:
    assert Geometry.from_fields(GEOMETRY.as_fields()) == GEOMETRY
    assert tuple(GEOMETRY.as_fields()) == GEOMETRY_FIELDS
    with pytest.raises(ValueError, match="attributes max_rows, pages: missing or unknown"):
        Geometry.from_fields({**{k: v for k, v in GEOMETRY.as_fields().items() if k != "max_rows"}, "pages": 1})
    with pytest.raises(ValueError, match=r"\.num_heads = 8: must be a multiple of 3 KV heads"):
        Geometry.from_fields({**GEOMETRY.as_fields(), "num_kv_heads": 3})
    with pytest.raises(ValueError, match=r"\.head_dim = 0: must be a whole number of at least 1"):
        Geometry.from_fields({**GEOMETRY.as_fields(), "head_dim": 0})


def test_shapes_have_to_be_those_of_the_attributes() -> None:
    known = [[SIZES.get(size, size) for size in shape] for shape in SHAPES]
    check_shapes(GEOMETRY, known)
    check_shapes(GEOMETRY, [[-1 if isinstance(size, str) else size for size in shape] for shape in SHAPES])
    known[3] = [2, 900, 8, 64]
    with pytest.raises(ValueError, match=r"k_pool has shape \[2, 900, 8, 64\], its attributes say \[2, -1, 16, 64\]"):
        check_shapes(GEOMETRY, known)


def test_parts_fit_where_they_are_kept_and_are_those_of_the_launcher() -> None:
    rng = np.random.default_rng(0)
    config = GEOMETRY.launch_config("bf16")
    num_limited = 0
    for _ in range(400):
        num_sequences, num_columns = int(rng.integers(1, 65)), int(2 ** rng.integers(0, 10))
        num_rows = num_sequences * int(rng.integers(1, 20))
        splits = num_splits(GEOMETRY, config, WHOLE_NUMBERS, num_rows, (num_sequences, num_columns))
        assert 1 <= splits <= MAX_SPLITS and num_rows * splits <= part_rows(num_rows)
        tiles = -(-(num_rows // num_sequences) // (config.block_m // GEOMETRY.group))
        wanted = choose_num_splits(num_sequences, GEOMETRY.num_kv_heads, 16 * num_columns, GEOMETRY.num_sms, tiles)
        assert splits == min(wanted, part_rows(num_rows) // num_rows)
        num_limited += splits < wanted
    assert 0 < num_limited < 200


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 256, 300])
def test_the_grid_has_a_tile_for_every_row_of_the_longest_chunk(num_rows: int) -> None:
    config = GEOMETRY.launch_config("fp16")
    launch = attend_launch(GEOMETRY, config, WHOLE_NUMBERS, num_rows, (3, 100), num_blocks=50)
    rows_per_tile = config.block_m // GEOMETRY.group
    tiles = launch.grid[0] // launch.scalars[-1]
    assert launch.grid == (tiles * launch.scalars[-1], 2, 3)
    assert tiles * rows_per_tile >= min(num_rows, GEOMETRY.max_rows) > (tiles - 1) * rows_per_tile
    assert launch.scalars[:3] == (num_rows, 50, 100)


@pytest.fixture(scope="module")
def registered() -> FakeTensorRt:
    fake = FakeTensorRt()
    register_aot_plugins("fake_tensorrt")
    register_aot_plugins("fake_tensorrt")  # the fake refuses a second definition
    return fake


def described(fake: FakeTensorRt, op: str, tensors: list[TensorDesc]):
    return fake.functions[f"{NAMESPACE}::{op}"]["describe"](*tensors, **GEOMETRY.as_fields())


def implemented(fake: FakeTensorRt, op: str, tensors: list[TensorDesc], outputs: tuple[TensorDesc, ...]):
    attributes = GEOMETRY.as_fields().values()
    return fake.functions[f"{NAMESPACE}::{op}"]["implement"](*tensors, *attributes, outputs, 0)


def attention_tensors() -> list[TensorDesc]:
    return [TensorDesc(shape, DataType[dtype]) for shape, dtype in zip(SHAPES, FLOATS + INTS, strict=True)]


def launch_at(launched: tuple) -> tuple[tuple[int, ...], list[int]]:
    """Grid and whole numbers for SIZES."""
    params, numbers = launched[2:]
    grid = (params.grid_x, params.grid_y, params.grid_z)
    return tuple(size if isinstance(size, int) else size.at(SIZES) for size in grid), [n.at(SIZES) for n in numbers]


def check_passed(compiled: Compiled, tensors: list[TensorDesc], launched: tuple, outputs: list[TensorDesc]) -> None:
    """What TensorRT passes - inputs, whole numbers, outputs - is what the kernel takes, by type."""
    types = {DataType.FLOAT: "*fp32", DataType.BF16: "*bf16", DataType.INT32: "*i32", DataType.INT64: "*i64"}
    passed = [*(types[t.dtype] for t in tensors), *["i32"] * len(launched[3]), *(types[t.dtype] for t in outputs)]
    assert [kind for _, kind in compiled.parameters] == passed
    params = launched[2]
    assert launched[:2] == (compiled.name, compiled.ptx)
    assert (params.block_x, params.block_y, params.shared_mem) == (compiled.num_warps * 32, 1, compiled.shared_bytes)


def test_both_halves_are_baked_in(registered: FakeTensorRt) -> None:
    tensors = attention_tensors()
    outputs = described(registered, "AttendSplits", tensors)
    assert [output.shape_at(SIZES) for output in outputs[:2]] == [[532, 8, 64], [532, 8, 2]]
    assert [output.source for output in outputs] == [None, None, tensors[3], tensors[4]]
    launched = implemented(registered, "AttendSplits", tensors, outputs)
    check_passed(compile_attend(GEOMETRY, "bf16", MAX_SHARED_BYTES), tensors, launched, list(outputs))
    config = GEOMETRY.launch_config("bf16")
    wanted = attend_launch(GEOMETRY, config, WHOLE_NUMBERS, 20, (4, 64), num_blocks=900)
    assert launch_at(launched) == (wanted.grid, list(wanted.scalars))

    by_name = dict(zip(ATTENTION_INPUTS, tensors, strict=True))
    halves = [*outputs[:2], by_name["q"], by_name["block_table"], by_name["cu_rows"]]
    combined = described(registered, "CombineSplits", halves)
    assert combined.shape_at(SIZES) == [20, 8, 64] and combined.source is None
    launched = implemented(registered, "CombineSplits", halves, (combined,))
    check_passed(compile_combine(GEOMETRY, "bf16"), halves, launched, [combined])
    assert launch_at(launched) == ((20, 8, 1), [4, wanted.scalars[-1]])


def test_signatures_are_classes_that_tensorrt_can_read(registered: FakeTensorRt) -> None:
    for op, num_tensors in (("AttendSplits", 9), ("CombineSplits", 5)):
        functions = registered.functions[f"{NAMESPACE}::{op}"]
        parameters = signature(functions["describe"]).parameters
        assert tuple(parameters)[num_tensors:] == GEOMETRY_FIELDS
        annotations = [parameter.annotation for parameter in parameters.values()]
        assert annotations == [TensorDesc] * num_tensors + [int] * len(GEOMETRY_FIELDS)
        assert tuple(signature(functions["implement"]).parameters) == (*parameters, "outputs", "tactic")


@pytest.fixture(scope="module")
def trt():
    return import_tensorrt("rtx").module


def plugin_inputs(trt, sizes=None, *, mask: bool = False) -> list:
    types = [trt.bfloat16] * 5 + [trt.int32] * 5 + [trt.int64]
    described = []
    for shape, dtype in zip([*SHAPES, *[("B",), ("T",)] * mask], types, strict=False):
        tensor = trt.DynamicPluginTensorDesc()
        tensor.desc.dims = [(sizes or {}).get(size, -1) if isinstance(size, str) else size for size in shape]
        tensor.desc.type, tensor.desc.format = dtype, trt.TensorFormat.LINEAR
        tensor.max = [SIZES.get(size, size) for size in shape]
        described.append(tensor)
    return described


def test_the_python_plugin_is_found_made_and_serialised(trt) -> None:
    register_v3_plugin(trt)
    num_creators = len(trt.get_plugin_registry().all_creators)
    register_v3_plugin(trt)
    assert len(trt.get_plugin_registry().all_creators) == num_creators
    creator = trt.get_plugin_registry().get_creator(ATTENTION_OP, VERSION, NAMESPACE)
    assert tuple(field.name for field in creator.field_names) == GEOMETRY_FIELDS
    made = plugin_classes(trt)[0](GEOMETRY, True)
    again = creator.create_plugin("layer", made.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
    for plugin, is_build in ((made, True), (again, False), (again.clone(), False)):
        assert (plugin.geometry, plugin.is_build, plugin.num_outputs) == (GEOMETRY, is_build, 3)
        assert (plugin.plugin_name, plugin.plugin_namespace, plugin.plugin_version) == (
            ATTENTION_OP,
            NAMESPACE,
            VERSION,
        )


def test_the_python_plugin_describes_itself(trt) -> None:
    plugin = plugin_classes(trt)[0](GEOMETRY, True)
    inputs = plugin_inputs(trt)
    assert plugin.get_output_data_types([tensor.desc.type for tensor in inputs]) == [trt.bfloat16] * 3
    plugin.configure_plugin(inputs, [])
    assert plugin.get_workspace_size(inputs, []) == sum(workspace_bytes(GEOMETRY, 20)) == 532 * 8 * (64 + 2) * 4
    shapes = plugin.get_output_shapes([trt.DimsExprs(len(shape)) for shape in SHAPES], [], None)
    assert [len(shape) for shape in shapes] == [3, 4, 4]
    aliases = [plugin.get_aliased_input(output) for output in range(3)]
    assert [ATTENTION_INPUTS[alias] if alias >= 0 else None for alias in aliases] == [None, "k_pool", "v_pool"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_float_type_and_row_by_row(trt, dtype: str) -> None:
    plugin, linear = plugin_classes(trt)[0](GEOMETRY, True), trt.TensorFormat.LINEAR
    fine = [getattr(trt, dtype)] * 5 + [trt.int32] * 4 + [getattr(trt, dtype)] * 3
    other = trt.float16 if dtype != "float16" else trt.bfloat16

    def is_supported(position: int, *, dtype=None, layout=linear) -> bool:
        described = [SimpleNamespace(desc=SimpleNamespace(type=each, format=linear)) for each in fine]
        described[position].desc = SimpleNamespace(type=dtype or fine[position], format=layout)
        return plugin.supports_format_combination(position, described, 9)

    for position in range(12):
        assert is_supported(position) and not is_supported(position, layout=trt.TensorFormat.CHW4)
        wrong = trt.int64 if 5 <= position < 9 else other
        assert is_supported(position, dtype=wrong) is (position == 0), "position 0 sets the type"
    assert not is_supported(0, dtype=trt.int8)


class RecordingKernel:
    """Takes the place of a kernel on a GPU, and of what loads it."""

    def __init__(self, compiled: Compiled, launches: list) -> None:
        self.compiled = compiled
        self._launches = launches

    def launch(self, grid, stream, values) -> None:
        names = [name for name, _ in self.compiled.parameters]
        self._launches.append((self.compiled.name, grid, stream, dict(zip(names, values, strict=True))))


def test_both_kernels_are_launched_on_the_stream_in_the_workspace() -> None:
    launches: list = []
    kernels = AttentionKernels(GEOMETRY, "bf16", lambda compiled: RecordingKernel(compiled, launches))
    addresses = {name: 4096 * (index + 1) for index, name in enumerate((*ATTENTION_INPUTS, *ATTENTION_OUTPUTS))}
    inputs = [addresses[name] for name in ATTENTION_INPUTS]
    outputs = [addresses[name] for name in ATTENTION_OUTPUTS]
    shapes = [[SIZES.get(size, size) for size in shape] for shape in SHAPES]
    kernels.launch(shapes, inputs, outputs, workspace=1 << 20, stream=7)
    (first, grid, stream, values), (second, combine_grid, combine_stream, combined) = launches
    assert (first, second) == ("attend_splits_kernel", "combine_parts_kernel")
    assert (stream, combine_stream, combine_grid) == (7, 7, (20, 8, 1))
    parts = {"mixed_parts": 1 << 20, "stat_parts": (1 << 20) + workspace_bytes(GEOMETRY, 20)[0]}
    passed = {**addresses, **parts}
    numbers = {"num_rows": 20, "num_blocks": 900, "num_columns": 64, "num_splits": values["num_splits"]}
    assert values == {**{name: passed[name] for name in values if name in passed}, **numbers}
    numbers = {"num_sequences": 4, "num_splits": values["num_splits"]}
    assert combined == {**{name: passed[name] for name in combined if name in passed}, **numbers}
    assert grid[0] % values["num_splits"] == 0


def test_nothing_is_loaded_or_launched_while_an_engine_is_built(trt) -> None:
    """A driver that is missing would show: loading needs one."""
    plugin = plugin_classes(trt)[0](GEOMETRY, True)
    described = [tensor.desc for tensor in plugin_inputs(trt, SIZES)]
    loaded_kernels.cache_clear()
    plugin.on_shape_change(described, [])
    plugin.enqueue(described, [], [0] * 9, [0] * 3, 0, 0)
    assert loaded_kernels.cache_info().currsize == 0


# -- the kernels, compiled and loaded ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "bf16"), (90, "bf16"), (90, "fp16"), (90, "fp32"), (120, "bf16")]
)
def test_parameters_are_inputs_numbers_outputs(capability: int, dtype: str) -> None:
    compiled = compile_attend(replace(GEOMETRY, capability=capability), dtype)
    names = [name for name, _ in compiled.parameters]
    numbers = ["num_rows", "num_blocks", "num_columns", "num_splits"]
    assert names == [*ATTENTION_INPUTS, *numbers, *ATTEND_OUTPUTS]
    floats = f"*{dtype}"
    types = [*[floats] * 5, *["*i32"] * 4, *["i32"] * 4, "*fp32", "*fp32", floats, floats]
    assert [kind for _, kind in compiled.parameters] == types
    assert compiled.cubin[:4] == b"\x7fELF" and entry_parameters(compiled.ptx) == [width_of(kind) for kind in types]

    combine = compile_combine(replace(GEOMETRY, capability=capability), dtype)
    assert [name for name, _ in combine.parameters] == [
        *COMBINE_INPUTS,
        "num_sequences",
        "num_splits",
        "attended",
    ]
    assert entry_parameters(combine.ptx) == [width_of(kind) for _, kind in combine.parameters]


def entry_parameters(ptx: str) -> list[str]:
    """Widths of what the kernel's entry point takes, in order."""
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)
    assert entry is not None
    return re.findall(r"\.param \.(\w+)", entry[1])


def width_of(kind: str) -> str:
    return "u64" if kind.startswith("*") else "u32"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_limit_of_shared_memory_is_kept(dtype: str) -> None:
    large = replace(GEOMETRY, head_dim=128)
    assert compile_attend(large, "bf16").shared_bytes > MAX_SHARED_BYTES
    assert compile_attend(large, dtype, MAX_SHARED_BYTES).shared_bytes <= MAX_SHARED_BYTES


def test_a_head_that_no_tile_of_the_limit_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim = 64: needs more shared memory than 512 bytes"):
        compile_attend(GEOMETRY, "bf16", 512)


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
    with pytest.raises(ValueError, match="kernel: 2 arguments, its parameters are 3"):
        kernel.launch((1, 1, 1), 0, (1, 2))


def test_more_shared_memory_than_usual_is_asked_for() -> None:
    driver = RecordingDriver()
    LoadedKernel(compiled(shared_bytes=90_000), driver)
    assert driver.calls[-1] == ("cuFuncSetAttribute", "result of cuKernelGetFunction", "shared", 90_000)


@pytest.mark.parametrize("failing", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"])
def test_a_refusal_names_the_call_and_the_kernel(failing: str) -> None:
    with pytest.raises(CudaError, match=f"{failing} of kernel: 1"):
        LoadedKernel(compiled(), RecordingDriver(failing))
