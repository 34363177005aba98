"""Layer information of engines: layers that copy a KV pool are found."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from faser_backend.engines.tensorrt_copies import check_no_copies, layer_information
from faser_backend.plugins.tensorrt_import import TensorRtError, import_tensorrt

POOL_SHAPE = [8, -1, 16, 128]


def tensor(name: str, shape: list[int]) -> dict[str, Any]:
    return {"Name": name, "Dimensions": shape, "Format/Datatype": "Row major linear FP16 format"}


def layer(name: str, kind: str, inputs: list[dict], outputs: list[dict]) -> dict[str, Any]:
    return {"Name": name, "LayerType": kind, "Inputs": inputs, "Outputs": outputs}


PLUGIN = layer(
    "attention 0",
    "PluginV3",
    [tensor("q", [-1, 32, 128]), tensor("k_pool.0", POOL_SHAPE), tensor("v_pool.0", POOL_SHAPE)],
    [tensor("attended", [-1, 32, 128]), tensor("k_pool_out.0", POOL_SHAPE), tensor("v_pool_out.0", POOL_SHAPE)],
)
PRODUCT = layer("qkv", "gemm", [tensor("hidden", [-1, 4096])], [tensor("qkv_out", [-1, 6144])])
REFORMAT = layer(
    "Reformatting CopyNode for Output Tensor 1 to attention 0",
    "Reformat",
    [tensor("Reformatted Output Tensor 1 to attention 0", POOL_SHAPE)],
    [tensor("k_pool_out.0", POOL_SHAPE)],
)


def reported(*layers: Any) -> str:
    return json.dumps({"Layers": list(layers), "Bindings": ["k_pool.0", "k_pool_out.0"]})


def test_the_plugin_may_touch_pools_and_others_may_touch_the_rest() -> None:
    check_no_copies(reported(PRODUCT, PLUGIN), "target.0.engine")
    check_no_copies(reported("gemm qkv", "PluginV3 attention of k_pool.0"), "target.0.engine")


def test_a_copy_is_refused_with_its_layers_and_pools() -> None:
    shuffled = layer("keep", "NoOp", [tensor("v_pool.12", POOL_SHAPE)], [tensor("x", [1])])
    with pytest.raises(TensorRtError) as refused:
        check_no_copies(reported(PLUGIN, REFORMAT, shuffled), "target.0.engine")
    words = str(refused.value)
    assert words.startswith("target.0.engine: 2 layers copy 2 KV pools in every call, as Reformatting CopyNode")
    assert "of k_pool_out.0; keep (NoOp) of v_pool.12;" in words and "use runtime torch" in words
    with pytest.raises(TensorRtError, match=r"1 layers copy 1 KV pools .* of k_pool\.3;"):
        check_no_copies(
            reported("gemm qkv", "Reformatting CopyNode for Input Tensor k_pool.3 to PluginV3 attention"), "x"
        )


@pytest.mark.parametrize("information", ["", "{}", "[]", '{"Layers": []}', '{"Layers": "none"}', "no json"])
def test_silence_is_not_taken_for_an_engine_without_copies(information: str) -> None:
    with pytest.raises(TensorRtError, match=r"target\.0\.engine: inspect: the layer information .* is unknown"):
        check_no_copies(information, "target.0.engine")


def test_information_is_asked_of_an_inspector_in_json() -> None:
    inspector = SimpleNamespace(get_engine_information=lambda kind: f"as {kind}")
    opened = SimpleNamespace(create_engine_inspector=lambda: inspector)
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda data: opened if data == b"engine" else None)
    module = SimpleNamespace(Runtime=lambda logger: runtime, LayerInformationFormat=SimpleNamespace(JSON="JSON"))
    assert layer_information(module, None, b"engine") == "as JSON"


def test_the_installed_module_has_what_is_asked_of_it() -> None:
    """TensorRT-RTX has the same inspector; full TensorRT cannot be loaded without a GPU's driver."""
    module = import_tensorrt("rtx").module
    assert hasattr(module.LayerInformationFormat, "JSON") and hasattr(module.ProfilingVerbosity, "DETAILED")
    assert hasattr(module.ICudaEngine, "create_engine_inspector")
    assert hasattr(module.EngineInspector, "get_engine_information")
