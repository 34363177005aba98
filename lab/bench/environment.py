"""Where figures were measured: device, versions, commit. Every results file carries this."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version

from faser_backend.device.cpu_runtime import cpu_name
from faser_backend.device.cuda.green_contexts import DriverError
from faser_backend.device.cuda.identity import gpu_facts, load_driver
from lab.places import ROOT

GPU_PACKAGES = ("torch", "triton", "cuda-python", "tensorrt-cu13", "tensorrt-rtx-cu13-libs")
PACKAGES = ("faser-backend", "numpy", "onnxruntime", "nvidia-pytriton", "tritonclient", "grpcio", "tokenizers")


def describe(seed: int) -> dict[str, object]:
    """Meta data of a run: plain values for JSON. gpu: the one that is there, used or not; None without one."""
    gpu = gpu_name()
    return {
        "device": cpu_name(),
        "gpu": gpu,
        "num_cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in PACKAGES + (GPU_PACKAGES if gpu else ())},
        "commit": commit(),
        "seed": seed,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def gpu_name() -> str | None:
    try:
        facts = gpu_facts(load_driver())
    except (DriverError, ImportError):
        return None
    return f"{facts.name}, {facts.num_sms} SMs, CUDA driver {facts.driver}"


def installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The checkout's commit, with + where tracked files differ from it."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return head + "+" * bool(changed)


def as_lines(meta: dict[str, object]) -> list[str]:
    """Two lines for people: what a table's reader must know."""
    versions, gpu = meta["versions"], meta.get("gpu")
    assert isinstance(versions, dict)
    where = f"{meta['device']}, {meta['num_cores']} cores" + (f", {gpu}" if gpu else "")
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return [
        f"Measured on {where} (load average at the start {meta['load_average']}), "
        f"{meta['date']}, commit {meta['commit']}, seed {meta['seed']}.",
        f"Python {meta['python']}; {packages}.",
    ]
