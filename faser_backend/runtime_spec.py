"""One row per runtime: what it stores, computes and needs. Others ask a row for what it can do, not for its name.

Knows nothing of devices or checkpoints; the manifest names a runtime, and building and serving look it up here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Flavour = Literal["rtx", "full"]


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """Contents of a runtime's engine directories, and what it takes to run them."""

    name: str
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")  # that engines can be built in
    is_cpu: bool = False
    extra: str = ""  # of faser-backend, that installs what the runtime imports
    tensorrt: Flavour | None = None  # by which engines are compiled
    is_weights_only: bool = False  # engines are weights: kernels of ours run the layers
    is_gathered: bool = False  # attention is the graph's own: all sequences are padded to the block table's columns
    has_experts: bool = True
    has_trees: bool = False  # rows that see their ancestors alone


RUNTIMES = {
    spec.name: spec
    for spec in (
        RuntimeSpec("llvm", ("fp32",), is_cpu=True, is_weights_only=True, has_trees=True),
        RuntimeSpec("tensorrt_rtx", extra="torch", tensorrt="rtx", is_gathered=True),
        RuntimeSpec("tensorrt", extra="tensorrt", tensorrt="full"),
        RuntimeSpec("torch", extra="torch", is_weights_only=True, has_experts=False),
    )
}
DEFAULT_RUNTIME = "llvm"  # of `faser build`, and of the demo pair
