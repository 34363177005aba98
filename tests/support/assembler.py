"""Assembles compiled kernels with the compiler's ptxas, which reports the registers that they need."""

import re
import subprocess
import tempfile
from pathlib import Path

from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

from faser_backend.plugins.tensorrt_aot import Compiled


def assemble(kernel: Compiled) -> tuple[int, int]:
    """Returns registers and spilled bytes (stores and loads) per thread. Fails if the result is no cubin, or slow."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(kernel.ptx)
        arch = sm_arch_from_capability(kernel.capability)
        command = [get_ptxas(kernel.capability).path, "-v", f"--gpu-name={arch}", str(source), "-o", str(cubin)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert cubin.read_bytes().startswith(b"\x7fELF")
        assert "serialized" not in report, report  # products of warp groups that do not overlap take a fifth longer
    registers = re.search(r"Used (\d+) registers", report)
    return int(registers[1]) if registers else 0, sum(map(int, re.findall(r"(\d+) bytes spill", report)))


def passes_its_parameters(kernel: Compiled) -> bool:
    """Returns whether the entry point has the kernel's parameters, by their widths."""
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", kernel.ptx)
    widths = ["u64" if kind.startswith("*") else "u32" for _, kind in kernel.parameters]
    return entry is not None and re.findall(r"\.param \.(\w+)", entry[1]) == widths
