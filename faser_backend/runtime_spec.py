"""The table of runtimes: what each stores, supports and needs. Code asks for a property, not for a runtime's name.

The manifest names a runtime; building and serving look it up here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Flavour = Literal["rtx", "full"]


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """The contents of a runtime's engine directories, and the requirements to run them."""

    name: str
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")  # of engines, the default first
    is_cpu: bool = False
    extra: str = ""  # the extra of faser-backend that the runtime needs
    tensorrt: Flavour | None = None  # the compiler of its engines
    has_experts: bool = True
    num_prefill_tokens: int = 1024  # prompt tokens per step, unless users choose

    @property
    def is_gathered(self) -> bool:
        """True if attention is part of the graph, which pads all sequences to the block table's columns."""
        return self.tensorrt == "rtx"


RUNTIMES = {
    spec.name: spec
    for spec in (
        RuntimeSpec("llvm", ("fp32",), is_cpu=True, num_prefill_tokens=256),
        RuntimeSpec("tensorrt_rtx", extra="torch", tensorrt="rtx", num_prefill_tokens=256),  # attention is padded
        RuntimeSpec("tensorrt", extra="tensorrt", tensorrt="full"),
        RuntimeSpec("torch", extra="torch", has_experts=False),
    )
}
DEFAULT_RUNTIME = "llvm"  # for `faser build` and the demo pair
