"""Compiles every kernel as the calls of real models launch it, for each compute capability; no GPU is needed.

Registers, spilled bytes and shared memory are the assembler's; with the Triton-language that is installed. Takes
minutes, so it is run by hand, and for one call of one model by a test.

    python -m lab.gpu.kernel_matrix
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from faser_backend.core.model import ModelSpec
from faser_backend.device.cuda.call_shapes import RowMenu
from faser_backend.device.cuda.segment import CallBounds
from lab.gpu.nodes import call_nodes, draw_nodes
from lab.gpu.pairs import model_pair
from lab.shapes import PAIRS, Pair
from lab.tables import markdown_table
from plugins.attention_config import shared_limit
from plugins.compile import WARP_SIZE, assemble

CAPABILITIES = (80, 90, 100, 120)
MOST_SPILLED = 32  # bytes of a thread: an address or two, which costs nothing beside the memory that is read
SMOLLM2 = ModelSpec(30, 576, 9, 3, 64, 1536, 49_152, 8192, 1e5, 1e-5, True)  # SmolLM2-135M
MODELS = {
    "smollm2-135m": SMOLLM2,
    "qwen3-32b": PAIRS["qwen3-32b/0.6b"].target,
    "qwen3-0.6b": PAIRS["qwen3-32b/0.6b"].draft,
}
MENU = RowMenu(64)
CALLS = {
    "decoding": MENU.of_decode(1, 1),
    "verification": MENU.of_decode(40, 1),
    "large verification": MENU.of_decode(256, 1),
    "verification of trees": MENU.of_decode(40, 1)._replace(has_trees=True),
    "prompt": CallBounds(256, 256, 256, 64, 0, 0),
}

Row = dict[str, Any]


class _Driver:
    """What the compiler asks of a GPU's driver before a launch."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, WARP_SIZE)

    def get_current_device(self) -> int:
        return 1000 + self._capability  # binaries are cached by device: none that is there

    def get_current_stream(self, _device: int) -> int:
        return 0


def kernel_rows(name: str, capability: int, calls: Mapping[str, CallBounds] = CALLS) -> list[Row]:
    """A row for every kernel that calls of model `name` launch, each binary once, for the call that needs it first."""
    models = model_pair(Pair(name, _short(MODELS[name]), _short(MODELS[name]), (1,)), "bf16")
    rows: dict[str, Row] = {}

    def watching(call: str) -> dict[str, Any]:
        def compile_as_launched(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            compiled = kernel.warmup(*map(_mocked, arguments), grid=(1,), **options)
            if compiled.hash not in rows:
                _, num_registers, spill_bytes = assemble(compiled.asm["ptx"], capability)
                rows[compiled.hash] = {
                    "model": name, "sm": capability, "kernel": kernel.__name__.removesuffix("_kernel"), "call": call,
                    "registers": num_registers, "spilled": spill_bytes, "shared": compiled.metadata.shared,
                }  # fmt: skip

        return {"on_launch": compile_as_launched, "capability": capability}

    with mock.patch.object(driver, "_active", _Driver(capability)):
        for call, bounds in calls.items():
            for index in range(2):
                call_nodes(models.target, index, bounds, **watching(call))
        scored = next(iter(calls.values()))._replace(num_candidates=8)
        call_nodes(models.target, 0, scored, **watching("scores at an exit"))
        draw_nodes(models.target.spec.vocab_size, 8, 0, has_filters=False, **watching("draw"))
    return list(rows.values())


def faults(rows: list[Row]) -> list[str]:
    """What does not fit its device, in words."""
    found = []
    for row in rows:
        where = f"{row['model']}, sm_{row['sm']}, {row['kernel']} of {row['call']}"
        if row["spilled"] > MOST_SPILLED:
            found.append(f"{where}: {row['spilled']} bytes spilled, at most {MOST_SPILLED}")
        if row["shared"] > shared_limit(row["sm"]):
            found.append(f"{where}: {row['shared']} bytes of shared memory, the limit is {shared_limit(row['sm'])}")
        if not 0 < row["registers"] <= 255:
            found.append(f"{where}: {row['registers']} registers")
    return found


def _short(spec: ModelSpec) -> ModelSpec:
    """Two layers have every kernel."""
    return replace(spec, num_layers=2, max_context=1024)


def _mocked(argument: Any) -> Any:
    """A tensor's type, for one whose address is a multiple of 16."""
    return MockTensor(argument.dtype) if hasattr(argument, "dtype") else argument


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(f"Triton-language {triton.__version__}")
    rows: list[Row] = []
    for name in MODELS:
        for capability in CAPABILITIES:
            each = kernel_rows(name, capability)
            print("\n".join(["", *markdown_table(list(each[0]), each)]), flush=True)
            rows += each
    for fault in (found := faults(rows)):
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
