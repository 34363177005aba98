"""The kernels that the plugin bakes in or launches: interpreted in a process of their own, compiled in this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.tensorrt_contract import (
    ATTEND_OUTPUTS,
    ATTENTION_INPUTS,
    COMBINE_INPUTS,
    COMBINE_OUTPUTS,
    Geometry,
)
from plugins.tensorrt_kernels import compile_attend, compile_combine

ROOT = Path(__file__).resolve().parents[1]
SHARED_LIMIT = 48 * 1024


def geometry(capability: int = 90, head_dim: int = 64, group: int = 4) -> Geometry:
    return Geometry(2 * group, 2, head_dim, 16, 256, 8, 132, capability)


def test_kernels_give_the_results_of_the_reference() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "--durations=3"]
    command = [sys.executable, "-m", "pytest", *options, "tests/interpreted_plugin_kernels.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b16 passed", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "bf16"), (90, "bf16"), (90, "fp16"), (90, "fp32"), (120, "bf16")]
)
def test_parameters_are_inputs_numbers_outputs(capability: int, dtype: str) -> None:
    compiled = compile_attend(geometry(capability), dtype)
    names = [name for name, _ in compiled.parameters]
    numbers = ["num_rows", "num_blocks", "num_columns", "num_splits"]
    assert names == [*ATTENTION_INPUTS, *numbers, *ATTEND_OUTPUTS]
    floats = f"*{dtype}"
    types = [*[floats] * 5, *["*i32"] * 4, *["i32"] * 4, "*fp32", "*fp32", floats, floats]
    assert [kind for _, kind in compiled.parameters] == types
    assert compiled.cubin[:4] == b"\x7fELF" and entry_parameters(compiled.ptx) == [width_of(kind) for kind in types]

    combine = compile_combine(geometry(capability), dtype)
    assert [name for name, _ in combine.parameters] == [
        *COMBINE_INPUTS,
        "num_sequences",
        "num_splits",
        *COMBINE_OUTPUTS,
    ]
    assert entry_parameters(combine.ptx) == [width_of(kind) for _, kind in combine.parameters]


def entry_parameters(ptx: str) -> list[str]:
    """Widths of what the kernel's entry point takes, in order."""
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)
    assert entry is not None
    return re.findall(r"\.param \.(\w+)", entry[1])


def width_of(kind: str) -> str:
    return "u64" if kind.startswith("*") else "u32"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_limit_of_shared_memory_is_kept(dtype: str) -> None:
    large = geometry(head_dim=128)
    assert compile_attend(large, "bf16").shared_bytes > SHARED_LIMIT
    assert compile_attend(large, dtype, SHARED_LIMIT).shared_bytes <= SHARED_LIMIT


def test_a_head_that_no_tile_of_the_limit_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim = 64: needs more shared memory than 512 bytes"):
        compile_attend(geometry(), "bf16", 512)
