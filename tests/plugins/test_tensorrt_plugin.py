"""The attention plugin without a GPU: its contract, and the kernels in its engines.

A recording fake registers it, as full TensorRT cannot be installed here.
"""

import ast
import importlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import reduce
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_backend.plugins.attention_config import (
    MAX_SPLITS,
    PROGRAMS_PER_SM,
    choose_num_splits,
    count_parts,
    num_tiles,
)
from faser_backend.plugins.tensorrt_aot import (
    MAX_SHARED_BYTES,
    Compiled,
    compile_attend,
    compile_combine,
    register_aot_plugins,
)
from faser_backend.plugins.tensorrt_contract import (
    ATTEND_OUTPUTS,
    ATTENTION_INPUTS,
    COMBINE_INPUTS,
    GEOMETRY_FIELDS,
    NAMESPACE,
    Geometry,
    attend_launch,
    num_splits,
    part_rows,
)
from faser_backend.plugins.tensorrt_import import TensorRtError, import_tensorrt
from tests.support.assembler import assemble, passes_its_parameters
from tests.support.fake_tensorrt_plugin import WHOLE_NUMBERS, DataType, FakeTensorRt, TensorDesc

GEOMETRY = Geometry(num_heads=8, num_kv_heads=2, head_dim=64, kv_block_size=16, tile_rows=8, num_sms=132, capability=90)

SHAPES = [("T", 8, 64), *[("T", 2, 64)] * 2, *[(2, "NB", 16, 64)] * 2, ("B", "MB"), ("B + 1",), ("B",), ("T",)]
SIZES = {"T": 20, "B": 4, "B + 1": 5, "NB": 900, "MB": 64}
FLOATS, INTS = ["BF16"] * 5, ["INT32"] * 4


def test_attributes_go_round() -> None:
    assert Geometry.from_fields(asdict(GEOMETRY)) == GEOMETRY
    assert tuple(asdict(GEOMETRY)) == GEOMETRY_FIELDS


def test_parts_fit_where_they_are_kept_and_are_those_of_the_launcher() -> None:
    rng = np.random.default_rng(0)
    config = GEOMETRY.launch_config("bf16")
    num_limited = 0
    for _ in range(400):
        num_sequences, num_columns = int(rng.integers(1, 65)), int(2 ** rng.integers(0, 10))
        num_rows = num_sequences * int(rng.integers(1, 20))
        splits = num_splits(GEOMETRY, config, WHOLE_NUMBERS, num_rows, (num_sequences, num_columns))
        assert 1 <= splits <= MAX_SPLITS and num_rows * splits <= part_rows(num_rows)
        tiles = -(-num_rows // (config.block_m // GEOMETRY.group))
        wanted = choose_num_splits(GEOMETRY.num_kv_heads, count_parts(16 * num_columns), GEOMETRY.num_sms, tiles)
        assert splits in {1, wanted} and (splits == wanted or num_rows * wanted > part_rows(num_rows))
        num_limited += splits < wanted
    assert 0 < num_limited < 200


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 256, 300])
def test_the_grid_is_what_the_gpu_holds_or_what_may_have_work(num_rows: int) -> None:
    config = GEOMETRY.launch_config("fp16")
    launch = attend_launch(GEOMETRY, config, WHOLE_NUMBERS, num_rows, (3, 100), num_blocks=50)
    most_items = num_tiles(num_rows, 3, config.block_m // GEOMETRY.group) * launch.scalars[-1]
    assert launch.grid == (min(most_items, PROGRAMS_PER_SM * 132 // 2), 2, 1)
    assert launch.scalars[:4] == (num_rows, 50, 3, 100)


@pytest.fixture(scope="module")
def registered() -> FakeTensorRt:
    fake = FakeTensorRt()
    register_aot_plugins("fake_tensorrt")
    register_aot_plugins("fake_tensorrt")  # the fake refuses a second definition
    return fake


def described(fake: FakeTensorRt, op: str, tensors: list[TensorDesc]):
    return fake.functions[f"{NAMESPACE}::{op}"]["describe"](*tensors, **asdict(GEOMETRY))


def implemented(fake: FakeTensorRt, op: str, tensors: list[TensorDesc], outputs: tuple[TensorDesc, ...]):
    attributes = asdict(GEOMETRY).values()
    return fake.functions[f"{NAMESPACE}::{op}"]["implement"](*tensors, *attributes, outputs, 0)


def launch_at(launched: tuple) -> tuple[tuple[int, ...], list[int]]:
    params, numbers = launched[2:]
    grid = (params.grid_x, params.grid_y, params.grid_z)
    return tuple(size if isinstance(size, int) else size.at(SIZES) for size in grid), [n.at(SIZES) for n in numbers]


def check_passed(compiled: Compiled, tensors: list[TensorDesc], launched: tuple, outputs: list[TensorDesc]) -> None:
    """Checks that TensorRT's arguments (inputs, integers, outputs) match the kernel's parameters by type."""
    types = {DataType.FLOAT: "*fp32", DataType.BF16: "*bf16", DataType.INT32: "*i32", DataType.INT64: "*i64"}
    passed = [*(types[t.dtype] for t in tensors), *["i32"] * len(launched[3]), *(types[t.dtype] for t in outputs)]
    assert [kind for _, kind in compiled.parameters] == passed
    params = launched[2]
    assert launched[:2] == (compiled.name, compiled.ptx)
    assert (params.block_x, params.block_y, params.shared_mem) == (compiled.num_warps * 32, 1, compiled.shared_bytes)


def test_both_halves_are_baked_in(registered: FakeTensorRt) -> None:
    tensors = [TensorDesc(shape, DataType[dtype]) for shape, dtype in zip(SHAPES, FLOATS + INTS, strict=True)]
    outputs = described(registered, "AttendSplits", tensors)
    assert [output.shape_at(SIZES) for output in outputs[:2]] == [[2068, 8, 64], [2068, 8, 2]]
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


# -- the kernels, compiled ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "bf16"), (90, "bf16"), (90, "fp16"), (90, "fp32"), (120, "bf16")]
)
def test_parameters_are_inputs_numbers_outputs(capability: int, dtype: str) -> None:
    compiled = compile_attend(replace(GEOMETRY, capability=capability), dtype)
    names = [name for name, _ in compiled.parameters]
    numbers = ["num_rows", "num_blocks", "num_sequences", "num_columns", "num_splits"]
    assert names == [*ATTENTION_INPUTS, *numbers, *ATTEND_OUTPUTS]
    floats = f"*{dtype}"
    types = [*[floats] * 5, *["*i32"] * 4, *["i32"] * 5, "*fp32", "*fp32", floats, floats]
    assert [kind for _, kind in compiled.parameters] == types
    assert assemble(compiled)[0] > 0 and passes_its_parameters(compiled)

    combine = compile_combine(replace(GEOMETRY, capability=capability), dtype)
    assert [name for name, _ in combine.parameters] == [*COMBINE_INPUTS, "num_sequences", "num_splits", "attended"]
    assert passes_its_parameters(combine)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_limit_of_shared_memory_is_kept(dtype: str) -> None:
    large = replace(GEOMETRY, head_dim=128)
    assert compile_attend(large, "bf16").shared_bytes > MAX_SHARED_BYTES
    assert compile_attend(large, dtype, MAX_SHARED_BYTES).shared_bytes <= MAX_SHARED_BYTES


def test_a_head_that_no_tile_of_the_limit_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim = 64: needs more shared memory than 512 bytes"):
        compile_attend(GEOMETRY, "bf16", 512)


ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "engines/tensorrt_build.py", "faser_backend/cuda/tensorrt_programs.py",
    "plugins/tensorrt_aot.py", "plugins/tensorrt_import.py",
)  # fmt: skip
CLASSES = {  # of variables, by their names; two kinds of `config` and of `profile`
    "builder": ("Builder",),
    "network": ("INetworkDefinition",),
    "parser": ("OnnxParser",),
    "config": ("IBuilderConfig", "IRuntimeConfig"),
    "engine": ("ICudaEngine", "IHostMemory"),
    "context": ("IExecutionContext",),
    "_runtime": ("Runtime",),
    "cache": ("IRuntimeCache",),
    "layer": ("ILayer", "IAttentionOutputLayer"),
    "attention": ("IAttention",),
    "create_engine_inspector": ("EngineInspector",),
}
OPTIONAL = {  # names that our code asks for first, by what lacks them
    "BuilderFlag.REQUIRE_USER_ALLOCATION", "ComputeCapability", "config.set_compute_capability",
    "config.num_compute_capabilities", "engine.create_runtime_config", "config.cuda_graph_strategy",
    "config.dynamic_shapes_kernel_specialization_strategy", "config.set_runtime_cache", "config.create_runtime_cache",
    "cache.serialize", "cache.deserialize", "CudaGraphStrategy.DISABLED", "DynamicShapesKernelSpecializationStrategy",
    "EngineInvalidityDiagnostics", "EngineInvalidityDiagnostics.__members__",
    "EngineInvalidityDiagnostics.__members__.items", "ComputeCapability.__members__", "CudaGraphStrategy",
    "_runtime.get_engine_validity", "engine.get_aliased_input_tensor",
    "builder.build_engine_with_config", "layer.get", "layer.values",  # the last two: a dict of the layer information
}  # fmt: skip


def names_in(source: str) -> Iterator[tuple[str, ...]]:
    """Yields (receiver, name, ...) of attributes of TensorRT's modules and objects."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            chain, value = [node.attr], node.value
            while isinstance(value, ast.Attribute | ast.Call):
                if isinstance(value, ast.Attribute):
                    chain.append(value.attr)
                value = value.value if isinstance(value, ast.Attribute) else value.func
            chain.append(value.id if isinstance(value, ast.Name) else "")
            for at, receiver in enumerate(chain[1:], 1):
                if receiver in CLASSES or receiver in {"module", "plugin"}:
                    yield tuple(reversed(chain[: at + 1]))
                    break


def part_of(holder: Any, name: str) -> Any:
    return getattr(holder, name, None)


def missing(trt: Any, plugin: Any, source: str) -> set[str]:
    """Returns the names that the bindings lack."""
    found = set()
    for receiver, *chain in names_in(source):
        modules = {"module": trt, "plugin": plugin}
        holders = [modules[receiver]] if receiver in modules else [getattr(trt, c, None) for c in CLASSES[receiver]]
        depth = len(chain) if receiver in modules else 1
        if any(holder is None for holder in holders[:1]) and receiver not in modules:
            found.add(f"{receiver}.{chain[0]}")
        elif modules.get(receiver, trt) is not None and all(
            reduce(part_of, chain[:depth], each) is None for each in holders
        ):
            found.add(".".join(chain if receiver in modules else (receiver, chain[0])))
    return found


@pytest.mark.parametrize("flavour", ["rtx", "full"])
def test_names_exist(flavour: Any) -> None:
    try:
        tensorrt = import_tensorrt(flavour)
    except TensorRtError as error:
        pytest.skip(str(error))
    plugin = None
    if flavour == "full":
        importlib.import_module("numpy.typing")
        plugin = importlib.import_module("tensorrt.plugin")
    text = "\n".join((ROOT / path).read_text().replace("from __future__ import annotations\n", "") for path in SOURCES)
    names = set(names_in(text))
    assert len(names) > 50
    assert missing(tensorrt.module, plugin, text) <= OPTIONAL
    invented = "module.Invented; module.BuilderFlag.INVENTED; builder.invented(); config.invented = 1"
    assert missing(tensorrt.module, plugin, invented) == {
        *("Invented", "BuilderFlag.INVENTED", "builder.invented", "config.invented")
    }
