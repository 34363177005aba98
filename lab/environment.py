"""Where figures were measured: device, versions, commit. Every results file carries this.

Needs no package: what a machine lacks is reported, not raised.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from faser_backend.lab.places import ROOT

GPU_PACKAGES = ("torch", "triton", "cuda-python", "tensorrt-cu13", "tensorrt-rtx-cu13-libs")
PACKAGES = ("faser-backend", "numpy", "numba", "nvidia-pytriton", "tritonclient", "grpcio", "tokenizers")
LOAD_AVERAGE = [round(load, 2) for load in os.getloadavg()]  # at the start, before what is measured adds to it
_QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"


def describe(seed: int) -> dict[str, Any]:
    """Returns a run's meta data as plain values for JSON. gpu: the GPU of the machine, used or not; else None."""
    from faser_backend.cpu.runtime import cpu_name

    gpu = ", ".join([*query_gpu().values()][:2])  # name and driver
    return {
        "device": cpu_name(),
        "gpu": gpu or None,
        "load_average": LOAD_AVERAGE,
        "versions": installed_versions(PACKAGES + (GPU_PACKAGES if gpu else ())),
        "seed": seed,
        **describe_checkout(),
    }


def describe_checkout() -> dict[str, Any]:
    """Returns what is known without any package."""
    return {
        "num_cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def query_gpu() -> dict[str, str]:
    """Returns the first GPU, its clocks and its driver from nvidia-smi; empty if that fails."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.strip().splitlines()
    return parse_gpu(lines[0]) if lines else {}


def parse_gpu(line: str) -> dict[str, str]:
    """Parses one line of nvidia-smi's answer into fields."""
    return dict(zip(_QUERY.split(","), (value.strip() for value in line.split(",")), strict=False))


def installed_versions(names: tuple[str, ...]) -> dict[str, str | None]:
    """Returns the packages' versions by name; None if not installed."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str:
    """Returns the checkout's commit, with + if tracked files differ from it."""
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return head + "+" * bool(changed)


def command_line() -> str:
    """Returns the running command as a reader would repeat it."""
    program = Path(sys.argv[0]).resolve()
    words = [program.name]
    if program.is_relative_to(ROOT / "lab"):
        module = ".".join(program.relative_to(ROOT).with_suffix("").parts)
        words = ["python", "-m", module.removesuffix(".__main__")]
    return without_paths(shlex.join([*words, *sys.argv[1:]]))


def without_paths(text: str) -> str:
    """Replaces absolute paths by their file names."""
    return re.sub(r"(?<![\w.~$}/])/(?:[\w.+-]+/)+([\w.+-]+)", r"\1", text)


def as_lines(meta: dict[str, Any]) -> list[str]:
    """Returns the two lines that a reader of a table needs."""
    where = f"{meta['device']}, {meta['num_cores']} cores" + (f", {meta['gpu']}" if meta.get("gpu") else "")
    packages = ", ".join(f"{name} {number or 'not installed'}" for name, number in meta["versions"].items())
    return [
        f"Measured on {where} (load average at the start {meta['load_average']}), "
        f"{meta['date']}, commit {meta['commit']}, seed {meta['seed']}.",
        f"Python {meta['python']}; {packages}.",
    ]
