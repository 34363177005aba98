"""Every TensorRT name in our sources exists in the bindings that are installed, by class, without a GPU.

TensorRT-RTX is installed where tests run. Full TensorRT's bindings are checked where they can be imported; its Python
packages of 10.16 and 11.4 can without its libraries, over ones that hold the functions asked for and nothing else.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faser_backend.plugins.tensorrt_import import TensorRtError, import_tensorrt

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


def missing(trt: Any, plugin: Any, source: str) -> set[str]:
    """Returns the names that the bindings lack."""
    found = set()
    for receiver, *chain in names_in(source):
        modules = {"module": trt, "plugin": plugin}
        holders = [modules[receiver]] if receiver in modules else [getattr(trt, c, None) for c in CLASSES[receiver]]
        depth = len(chain) if receiver in modules else 1
        if any(holder is None for holder in holders[:1]) and receiver not in modules:
            found.add(f"{receiver}.{chain[0]}")
        elif modules.get(receiver, trt) is not None and not any(has_chain(each, chain[:depth]) for each in holders):
            found.add(".".join(chain if receiver in modules else (receiver, chain[0])))
    return found


def has_chain(holder: Any, chain: list[str]) -> bool:
    for name in chain:
        if not hasattr(holder, name):
            return False
        holder = getattr(holder, name)
    return True


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
