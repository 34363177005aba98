"""Layer information of engines: layers that copy a KV pool are found."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from faser_backend.engines.tensorrt_build import check_no_copies
from faser_backend.plugins.tensorrt_import import TensorRtError

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


MODULE = SimpleNamespace(LayerInformationFormat=SimpleNamespace(JSON="JSON"))


def engine_of(information: str) -> Any:
    """Returns an engine whose inspector answers `information`."""
    inspector = SimpleNamespace(get_engine_information=lambda kind: information if kind == "JSON" else "")
    return SimpleNamespace(create_engine_inspector=lambda: inspector)


def reported(*layers: Any) -> str:
    return json.dumps({"Layers": list(layers), "Bindings": ["k_pool.0", "k_pool_out.0"]})


def check(information: str) -> None:
    check_no_copies(MODULE, engine_of(information), "target.0.engine")


def test_the_plugin_may_touch_pools_and_others_may_touch_the_rest() -> None:
    check(reported(PRODUCT, PLUGIN))
    check(reported("gemm qkv", "PluginV3 attention of k_pool.0"))
    for field, value in (("TacticName", "attend_splits_kernel"), ("Metadata", "[ONNX Layer: faser::AttendSplits]")):
        fused = PLUGIN | {"LayerType": "kgen", field: value}
        check(reported(PRODUCT, fused))
        with pytest.raises(TensorRtError, match="copy 4 KV pools"):
            check(reported(PRODUCT, fused | {field: "another"}))


def test_a_copy_is_refused_with_its_layers_and_pools() -> None:
    shuffled = layer("keep", "NoOp", [tensor("v_pool.12", POOL_SHAPE)], [tensor("x", [1])])
    with pytest.raises(TensorRtError) as refused:
        check(reported(PLUGIN, REFORMAT, shuffled))
    words = str(refused.value)
    assert words.startswith("target.0.engine: 2 layers copy 2 KV pools in every call, as Reformatting CopyNode")
    assert "of k_pool_out.0; keep (NoOp) of v_pool.12;" in words
    assert "; use runtime torch, or --pool-copies allow" in words
    with pytest.raises(TensorRtError, match=r"1 layers copy 1 KV pools .* of k_pool\.3;"):
        check(reported("gemm qkv", "Reformatting CopyNode for Input Tensor k_pool.3 to PluginV3 attention"))


@pytest.mark.parametrize("information", ["", "{}", "[]", '{"Layers": []}', '{"Layers": "none"}', "no json"])
def test_silence_is_not_taken_for_an_engine_without_copies(information: str) -> None:
    with pytest.raises(TensorRtError, match=r"target\.0\.engine: inspect: the layer information .* is unknown"):
        check(information)
