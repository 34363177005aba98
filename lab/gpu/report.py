"""The results file: where it lies, what heads it, and that it is whole after every part."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lab.gpu.harness import Outcome, Setting
from lab.places import RESULTS, ROOT

NEEDED = ("numpy", "torch", "triton", "cuda-bindings", "pydantic", "safetensors", "tokenizers", "ml-dtypes")
USEFUL = ("onnx", "onnxruntime", "numba", "cuda-core", "tensorrt", "tensorrt-rtx-cu13-bindings", "faser-backend")
_QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"


class Report:
    """Collects outcomes, and rewrites its file with each of them."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {"meta": meta, "parts": {}}

    def record(self, name: str, outcome: Outcome) -> None:
        self.content["parts"][name] = asdict(outcome)
        self.save()

    def save(self) -> None:
        """The rename makes the new file appear whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(without_places(json.dumps(self.content, indent=1)) + "\n")
        os.replace(partial, self.path)


def describe(setting: Setting, gpu: dict[str, str]) -> dict[str, Any]:
    """Meta data of a run: plain values for JSON."""
    versions = {name: installed_version(name) for name in (*NEEDED, *USEFUL)}
    return {
        "device": gpu.get("name") if setting.device == "cuda" else "cpu",
        "gpu": gpu,
        "python": platform.python_version(),
        "system": platform.platform(),
        "num_cores": len(os.sched_getaffinity(0)),
        "versions": versions,
        "missing": [name for name in NEEDED if versions[name] is None],
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        **asdict(setting),
    }


def default_path(meta: dict[str, Any]) -> Path:
    """benchmarks/results/gpu-<name>-<date>.json."""
    return RESULTS / f"gpu-{slug(meta['device'] or 'none')}-{meta['date'][:10]}.json"


def slug(name: str) -> str:
    """For a file name: "NVIDIA H100 80GB HBM3" gives "h100-80gb-hbm3"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(word for word in words if word != "nvidia") or "none"


def without_places(text: str) -> str:
    """Absolute paths, which errors are full of, become the names of their files."""
    return re.sub(r"(?<![\w.~$}/])/(?:[\w.+-]+/)+([\w.+-]+)", r"\1", text)


def query_gpu() -> dict[str, str]:
    """The first GPU, its clocks and its driver, as nvidia-smi tells; empty where it does not."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.strip().splitlines()
    return parse_gpu(lines[0]) if lines else {}


def parse_gpu(line: str) -> dict[str, str]:
    """A line of nvidia-smi's answer, by field."""
    return dict(zip(_QUERY.split(","), (value.strip() for value in line.split(",")), strict=False))


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """The checkout's commit, with + where tracked files differ from it."""
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return head + "+" * bool(changed)
