"""Reports the device's properties and the runtimes that load here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from faser_backend.lab.gpu.harness import Context, Result
from faser_backend.plugins.tensorrt_import import Flavour, import_tensorrt

FLAVOURS: dict[str, Flavour] = {"tensorrt": "full", "tensorrt_rtx": "rtx"}
MODULES = ("torch", "triton", "cuda.bindings.driver", "cuda.core", "tensorrt", "tensorrt_rtx", "pydantic", "tokenizers")
MODULES += ("safetensors", "tritonclient", "pytriton")


def device(context: Context) -> Result:
    """Returns the modules that import and the device's properties."""
    found: Result = {"modules": {name: _outcome(lambda name=name: _version(name)) for name in MODULES}}
    context.save(found)
    if context.is_cuda:
        found["properties"] = _properties()
    return found


def _version(name: str) -> str:
    if name in FLAVOURS:  # installed under several names, as for `faser doctor`
        return import_tensorrt(FLAVOURS[name]).version
    return str(getattr(import_module(name), "__version__", "imported"))


def _outcome(work: Callable[[], Any]) -> str:
    """Returns the result of `work`, or its error in a line."""
    try:
        return str(work())
    except Exception as error:
        return f"no: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def _properties() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "num_sms": properties.multi_processor_count,
        "l2_mib": getattr(properties, "L2_cache_size", 0) / 2**20,
        "memory_gib": total / 2**30,
        "free_gib": free / 2**30,
        "cuda": torch.version.cuda,
        "stream_priorities": list(torch.cuda.Stream().priority_range()),
    }
