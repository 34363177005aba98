"""A results file as text: a table per part, then the parts and the goals. Pure; needs no package."""

from __future__ import annotations

from typing import Any

from lab.gpu.goals import Goal, judged
from lab.gpu.sections import SECTIONS, number, plain, table

Lines = list[str]


def render(content: dict[str, Any]) -> str:
    """The whole report of {"meta", "parts"}; parts that failed say so. The verdict stands last, where a terminal
    shows it."""
    parts = content["parts"]
    lines = heading(content["meta"])
    for name, part in parts.items():
        if part["result"]:
            lines += ["", f"## {name}: {part['title']}", *SECTIONS.get(_kind(name), plain)(part["result"])]
        if part["error"] and part["status"] != "skipped":
            lines += ["", f"### {name} {part['status']}", *(f"    {line}" for line in part["error"].splitlines())]
    lines += ["", "## Parts", *table(["part", "", "s", "of s", "error"], [_part_row(*each) for each in parts.items()])]
    if not content["meta"]["is_tiny"]:
        results = {name: part["result"] for name, part in parts.items()}
        goals = [[goal.name, _goal_limit(goal), number(value), word] for goal, value, word in judged(results)]
        lines += ["", "## Goals", *table(["goal", "limit", "measured", ""], goals)]
    return "\n".join(lines) + "\n"


def heading(meta: dict[str, Any]) -> Lines:
    gpu = meta.get("gpu") or {}
    versions = ", ".join(f"{name} {number}" for name, number in meta["versions"].items() if number)
    lines = [
        f"# GPU check: {meta['device']}",
        "",
        f"{meta['date']}, commit {meta['commit']}, seed {meta['seed']}, Python {meta['python']}, "
        f"{meta['num_cores']} cores. {versions}.",
    ]
    if gpu:
        lines.append(f"nvidia-smi at the start: {_fields(gpu)}.")
        if meta.get("gpu_at_end"):
            lines.append(f"nvidia-smi at the end: {_fields(meta['gpu_at_end'])}.")
    if meta["missing"]:
        lines.append(f"Not installed, so that parts fail: {', '.join(meta['missing'])}.")
    if meta["is_tiny"]:
        lines.append("Tiny shapes: this run checks the script, its figures say nothing.")
    return lines


def _fields(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _goal_limit(goal: Goal) -> str:
    return f"{'<=' if goal.is_most else '>='} {goal.limit:g}{goal.unit}"


def _part_row(name: str, part: dict[str, Any]) -> list[Any]:
    last = part["error"].splitlines()[-1] if part["error"] else ""
    return [name, part["status"], part["seconds"], part["limit_s"], last[:100].replace("|", "/")]


def _kind(name: str) -> str:
    return "ladder" if name.startswith("ladder") else "parity" if name in ("parity", "rtx", "tensorrt") else name
