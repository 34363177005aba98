"""The results file of a GPU check, and the same as text: a table of parts, then each part.

Needs only the standard library. The file is complete after every part.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from faser_backend.lab.environment import describe_checkout, installed_versions, without_paths
from faser_backend.lab.gpu.harness import Outcome, Result, Setting
from faser_backend.lab.places import RESULTS
from faser_backend.lab.tables import markdown_table, number, pairs

NEEDED = ("numpy", "torch", "triton", "cuda-bindings", "pydantic", "safetensors", "tokenizers", "ml-dtypes")
USEFUL = ("onnx", "numba", "cuda-core", "tensorrt", "tensorrt-rtx-cu13-bindings", "faser-backend")
MOST_FIELDS = 12  # of a dictionary within a table


class Report:
    """A collector of outcomes that rewrites its file with each of them."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {"meta": meta, "parts": {}}

    def record(self, name: str, outcome: Outcome) -> None:
        self.content["parts"][name] = asdict(outcome)
        self.save()

    def save(self) -> None:
        """Writes the file under another name, then renames it: readers never see half a file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(without_paths(json.dumps(self.content, indent=1)) + "\n")
        os.replace(partial, self.path)


def describe(setting: Setting, gpu: dict[str, str]) -> dict[str, Any]:
    """Returns a run's meta data as plain values for JSON."""
    versions = installed_versions((*NEEDED, *USEFUL))
    return {
        "gpu": gpu,
        "versions": versions,
        "missing": [name for name in NEEDED if versions[name] is None],
        **describe_checkout(),
        **asdict(setting),
        "device": gpu.get("name") if setting.device == "cuda" else "cpu",
    }


def default_path(meta: dict[str, Any]) -> Path:
    """Returns benchmarks/results/gpu-<name>-<date>.json; "NVIDIA H100 80GB HBM3" gives "h100-80gb-hbm3"."""
    words = [word for word in re.findall(r"[a-z0-9]+", (meta["device"] or "none").lower()) if word != "nvidia"]
    return RESULTS / f"gpu-{'-'.join(words)}-{meta['date'][:10]}.json"


def render(content: dict[str, Any]) -> str:
    """Returns the report of {"meta", "parts"} as text, failed parts included. The verdict is last, where a terminal
    shows it."""
    parts = content["parts"]
    lines, ended = heading(content["meta"]), []
    for name, part in parts.items():
        if part["result"]:
            lines += ["", f"## {name}: {part['title']}", *section(part["result"])]
        if part["error"] and part["status"] != "skipped":
            lines += ["", f"### {name} {part['status']}", *(f"    {line}" for line in part["error"].splitlines())]
        error = part["error"].splitlines()[-1][:100] if part["error"] else ""
        row = {"part": name, "status": part["status"], "s": part["seconds"], "of s": part["limit_s"], "error": error}
        ended.append(row)
    lines += ["", "## Parts", *markdown_table(("part", "status", "s", "of s", "error"), ended)]
    return "\n".join(lines) + "\n"


def heading(meta: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items() if version)
    lines = [
        f"# GPU check: {meta['device']}",
        "",
        f"{meta['date']}, commit {meta['commit']}, seed {meta['seed']}, Python {meta['python']}, "
        f"{meta['num_cores']} cores. {versions}.",
    ]
    for when, key in (("start", "gpu"), ("end", "gpu_at_end")):
        if meta.get(key):
            lines.append(f"nvidia-smi at the {when}: {pairs(meta[key])}.")
    if meta["missing"]:
        lines.append(f"Not installed, so that parts fail: {', '.join(meta['missing'])}.")
    if meta["is_tiny"]:
        lines.append("Tiny shapes: this run checks the script, its figures say nothing.")
    return lines


def section(result: Result) -> list[str]:
    """Returns a part's result: single values in a line each, and a table for every list of rows."""
    lines = []
    for name, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            flat = [dict(_flat(row)) for row in value]
            columns = list(dict.fromkeys(key for row in flat for key in row))
            lines += ["", f"### {name}", *markdown_table(columns, flat), ""]
        elif isinstance(value, dict):
            lines.append(f"- {name}: {pairs(value)}")
        elif value not in ([], None):
            lines.append(f"- {name}: {number(value)}")
    return lines


def _flat(row: Result, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flattens a row: a dictionary's fields become "name.field", lists of rows a short summary."""
    for name, value in row.items():
        if isinstance(value, dict) and len(value) <= MOST_FIELDS:
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{prefix}{name}", "; ".join(pairs(each) for each in value)
        elif not isinstance(value, dict):
            yield f"{prefix}{name}", value if not isinstance(value, str) else value[:160].replace("\n", " ")
