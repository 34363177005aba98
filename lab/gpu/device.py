"""What the device is, which runtimes load here, and what it can do at best: the ceilings of every other part."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from lab.environment import query_gpu
from lab.gpu.worker import Context, Result
from plugins.tensorrt_import import Flavour, import_tensorrt

GEMM_ROWS = (1, 8, 32, 64, 160, 320, 512, 8192)
REPEATS = 15
FLAVOURS: dict[str, Flavour] = {"tensorrt": "full", "tensorrt_rtx": "rtx"}
MODULES = (
    "torch",
    "triton",
    "cuda.bindings.driver",
    "cuda.core",
    "onnxruntime",
    "tensorrt",
    "tensorrt_rtx",
    "pydantic",
    "tokenizers",
    "safetensors",
    "tritonclient",
    "pytriton",
)


def device(context: Context) -> Result:
    """Modules that import, the device's properties, and a kernel of the Triton language that runs."""
    found: Result = {"modules": {name: _outcome(lambda name=name: _version(name)) for name in MODULES}}
    context.save(found)
    if context.is_cuda:
        found["properties"] = _properties()
        context.save(found)
        found["kernel"] = _outcome(_run_kernel)
    return found


def _version(name: str) -> str:
    if name in FLAVOURS:  # as `faser doctor` asks for it: it goes by several names
        return import_tensorrt(FLAVOURS[name]).version
    return str(getattr(import_module(name), "__version__", "imported"))


def _outcome(work: Callable[[], Any]) -> str:
    """What it returned, or its error in a line."""
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


def _run_kernel() -> str:
    """The row compaction kernel, the smallest of ours."""
    import torch

    from plugins.row_compaction import compact_rows

    hidden, kept = torch.randn(8, 64, device="cuda"), torch.tensor([1, 5], device="cuda")
    out = torch.empty(2, 64, device="cuda")
    compact_rows(hidden, kept, out)
    assert torch.equal(out, hidden[kept]), "the kernel ran, and its result is wrong"
    return "ran"


def peaks(context: Context) -> Result:
    """Copy bandwidth over buffer sizes; bf16 products of a tall weight with few rows, and of a large square."""
    sizes = (1 << 16, 1 << 20) if context.is_tiny else (4 << 20, 32 << 20, 256 << 20, 1 << 30, 4 << 30)
    found: Result = {"copies": [], "products": []}
    for num_bytes in sizes:
        rate = copy_bytes_per_s(context.device, num_bytes)
        found["copies"].append({"mib": num_bytes / 2**20, "gb_per_s": rate / 1e9})
        context.save(found)
    width, depth = (64, 64) if context.is_tiny else (12288, 4096)
    rows = (1, 8) if context.is_tiny else GEMM_ROWS
    for num_rows in rows:
        found["products"].append(_product(context.device, num_rows, depth, 8192 if num_rows == 8192 else width))
        context.save(found)
    if context.is_cuda:
        found["clocks"] = query_gpu()  # right after the largest product, before the device rests
    found["copy_gb_per_s"] = max(row["gb_per_s"] for row in found["copies"][-2:])
    found["gemm_tflops"] = max(row["tflops"] for row in found["products"])
    return found


def copy_bytes_per_s(device: str, num_bytes: int) -> float:
    """Bytes read and written per second by a copy between two buffers of num_bytes each."""
    import torch

    source = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).normal_()
    sink = torch.empty_like(source)
    return 2 * num_bytes / _best_us(device, lambda: sink.copy_(source)) * 1e6


def _product(device: str, num_rows: int, depth: int, width: int) -> dict[str, float]:
    """x [num_rows, depth] @ w [width, depth]^T, over several weights so that none stays in the cache."""
    import torch

    copies = 1 if num_rows == 8192 else 4
    weights = [torch.empty(width, depth, dtype=torch.bfloat16, device=device).normal_() for _ in range(copies)]
    x = torch.empty(num_rows, depth, dtype=torch.bfloat16, device=device).normal_()

    def multiply() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    each_us = _best_us(device, multiply) / copies
    return {
        "rows": num_rows,
        "us": each_us,
        "tflops": 2.0 * num_rows * depth * width / each_us / 1e6,
        "weight_gb_per_s": 2.0 * depth * width / each_us / 1e3,
    }


def _best_us(device: str, work: Callable[[], object]) -> float:
    """The median: peaks are what can be had again and again."""
    from lab.gpu.timing import take_turns

    return take_turns(device, {"": work}, 3 if device == "cpu" else REPEATS)[""].median_us
