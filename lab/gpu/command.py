"""Proves on a GPU what cannot be proven without one: one command, in eight minutes, no network, nothing installed.

Every part runs in a child process with a limit and is written down when it ends: what crashes, hangs or runs out of
time takes nothing else with it. docs/gpu-check.md says what each part shows.

    python scripts/gpu_check.py                                   # everything, into benchmarks/results
    python scripts/gpu_check.py --parts kernels,bandwidth
    python scripts/gpu_check.py --table benchmarks/results/gpu-h100-80gb-hbm3-2026-11-21.json
    python scripts/gpu_check.py --device cpu --budget-s 60 --tiny   # checks the script itself
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from lab.environment import query_gpu
from lab.gpu.harness import Harness, Outcome, Part, Setting
from lab.gpu.report import Report, default_path, describe, render

FULL_BUDGET_S = 500.0
PARTS = (
    Part("device", "device and libraries", "lab.gpu.device:device", 20),
    Part("first", "first contact: captures, serving, steps", "lab.gpu.first_contact:run", 160),
    Part("peaks", "copy bandwidth and matrix products", "lab.gpu.device:peaks", 20),
    Part("kernels", "kernels against their references", "lab.gpu.kernels:correctness", 45),
    Part("bandwidth", "bandwidth of kernels", "lab.gpu.kernels:bandwidth", 35),
    Part("sms", "SM splits", "lab.gpu.sms:run", 20, needs_gpu=True),
    Part("parity", "runtime torch against ONNX Runtime", "lab.gpu.parity:torch_runtime", 50),
    Part("ladder", "policies and mechanisms, demo pair", "lab.gpu.ladder:demo", 120),
    Part("rtx", "TensorRT-RTX", "lab.gpu.parity:rtx_runtime", 60),
    Part("tensorrt", "full TensorRT", "lab.gpu.parity:tensorrt_runtime", 65),
)  # fmt: skip


def chosen_parts(names: str | None) -> list[Part]:
    """Parts by name, in their own order. Raises ValueError for an unknown one."""
    if names is None:
        return list(PARTS)
    wanted = [name.strip() for name in names.split(",")]
    known = [part.name for part in PARTS]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"--parts = {unknown[0]!r}: unknown; known are {', '.join(known)}")
    return [part for part in PARTS if part.name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file; default benchmarks/results/gpu-<name>-<date>.json")
    parser.add_argument("--parts", help="names separated by commas; default all")
    parser.add_argument("--budget-s", type=float, default=FULL_BUDGET_S, help="of the whole run; limits of parts scale")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: checks the script, measures nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a results file and do nothing else")
    options = parser.parse_args()
    if options.table is not None:
        print(render(json.loads(options.table.read_text())), end="")
        return 0
    if options.budget_s <= 0:
        parser.error(f"--budget-s = {options.budget_s:g}: must be positive")
    try:
        parts = chosen_parts(options.parts)
    except ValueError as error:
        parser.error(str(error))
    setting = Setting(options.device, options.tiny, options.seed)
    meta = describe(setting, query_gpu() if options.device == "cuda" else {})
    report = Report(options.output or default_path(meta), meta | {"budget_s": options.budget_s})

    def record(name: str, outcome: Outcome) -> None:
        report.record(name, outcome)
        last = outcome.error.splitlines()[-1] if outcome.error else ""
        print(f"{name:12} {outcome.status:10} {outcome.seconds:6.1f} s  {last}", file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a child on the GPU is ended too
    Harness(setting, options.budget_s, FULL_BUDGET_S, record).run(parts)
    if options.device == "cuda":
        report.content["meta"]["gpu_at_end"] = query_gpu()
        report.save()
    print(render(report.content), end="")
    print(f"\nwritten to {report.path}", file=sys.stderr)
    failed = [part for part in report.content["parts"].values() if part["status"] in ("failed", "timed out", "died")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
