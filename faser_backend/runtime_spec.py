"""One row per runtime: what it stores, computes and needs. Others ask a row for what it can do, not for its name.

Knows nothing of devices or checkpoints; the manifest names a runtime, and building and serving look it up here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from faser_backend.core.model import WEIGHT_FORMATS

Flavour = Literal["rtx", "full"]


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """What an engine directory of a runtime holds, and what runs it."""

    name: str
    opens: str  # module:function of (engine_dir, manifest, config) that opens the device
    packages: tuple[str, ...]  # whose versions decide how long calls take
    dtypes: tuple[str, ...]  # that engines can be built in
    is_cpu: bool = False
    extra: str = ""  # of faser-backend, that installs what the runtime imports
    tensorrt: Flavour | None = None  # by which engines are compiled
    is_weights_only: bool = False  # engines are weights: kernels of ours run the layers
    has_parts: bool = False  # graphs are cut at every layer's attention
    is_gathered: bool = False  # attention is the graph's own: all sequences are padded to the block table's columns
    weight_formats: tuple[str, ...] = ("fp32",)  # of matrices; on a GPU they have the dtype
    keeps_formats: bool = False  # of a checkpoint's matrices, unless others are asked for; of a draft head's as well
    has_experts: bool = True
    has_trees: bool = False  # rows that see their ancestors alone
    has_lanes: bool = True  # where draft and target can run at the same time

    def opener(self) -> Any:
        """Imports and returns what opens the device. Raises ImportError where a package is missing."""
        module, _, function = self.opens.partition(":")
        return getattr(import_module(module), function)


_CPU, _CUDA = "faser_backend.device.cpu_runtime", "faser_backend.device.cuda.runtime:open_cuda_runtime"
_HALVES = ("fp32", "fp16", "bf16")
RUNTIMES = {
    spec.name: spec
    for spec in (
        RuntimeSpec(
            "onnxruntime",
            f"{_CPU}:open_onnxruntime",
            ("onnxruntime", "numba"),
            ("fp32",),
            is_cpu=True,
            has_parts=True,
            weight_formats=WEIGHT_FORMATS[:-1],
            has_lanes=False,
        ),
        RuntimeSpec(
            "llvm",
            f"{_CPU}:open_llvm",
            ("numba", "llvmlite"),
            ("fp32",),
            is_cpu=True,
            is_weights_only=True,
            weight_formats=WEIGHT_FORMATS,
            keeps_formats=True,
            has_trees=True,
        ),
        RuntimeSpec(
            "tensorrt_rtx",
            _CUDA,
            (),
            _HALVES,
            extra="torch",
            tensorrt="rtx",
            is_gathered=True,
        ),
        RuntimeSpec(
            "tensorrt",
            _CUDA,
            (),
            _HALVES,
            extra="tensorrt",
            tensorrt="full",
        ),
        RuntimeSpec(
            "torch",
            _CUDA,
            ("torch",),
            _HALVES,
            extra="torch",
            is_weights_only=True,
            has_experts=False,
        ),
    )
}
DEFAULT_RUNTIME = "llvm"  # of `faser build`, and of the demo pair
CPU_RUNTIMES = tuple(name for name, spec in RUNTIMES.items() if spec.is_cpu)


def flavour_of(runtime: str) -> Flavour:
    """Which TensorRT compiles and runs this runtime's engines. Raises ValueError where none does."""
    flavour = RUNTIMES[runtime].tensorrt
    if flavour is None:
        raise ValueError(f"runtime = {runtime!r}: TensorRT does not compile its engines")
    return flavour
