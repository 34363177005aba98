"""Checks on a GPU what cannot be checked without one: one command, eight minutes, no network, nothing installed.

Every part runs in a child process with a limit and is recorded when it ends, so that a crash or a hang loses nothing
else. docs/gpu-check.md describes what each part shows.

    python scripts/gpu_check.py                                   # everything, into benchmarks/results
    python scripts/gpu_check.py --parts kernels,bandwidth
    python scripts/gpu_check.py --table benchmarks/results/gpu-h100-80gb-hbm3-2026-11-28.json
    python scripts/gpu_check.py --device cpu --budget-s 60 --tiny   # checks the script itself
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from faser_backend.lab.environment import query_gpu
from faser_backend.lab.gpu.harness import Outcome, Part, Setting, run_parts
from faser_backend.lab.gpu.report import Report, default_path, describe, render
from faser_backend.places import GPU_DEVICE

FULL_BUDGET_S = 500.0
PARTS = (
    Part("device", "device and libraries", "faser_backend.lab.gpu.device:device", 20),
    Part("first", "first contact: captures, serving, steps", "faser_backend.lab.gpu.first_contact:run", 160),
    Part("serve", "an 8B pair through faser serve", "faser_backend.lab.gpu.serve:run", 300),
    Part("peaks", "copy bandwidth and matrix products", "faser_backend.lab.gpu.speed:peaks", 20),
    Part("kernels", "kernels against their references", "faser_backend.lab.gpu.kernels:correctness", 45),
    Part("bandwidth", "bandwidth of kernels", "faser_backend.lab.gpu.speed:bandwidth", 35),
    Part("sms", "SM splits", "faser_backend.lab.gpu.sms:run", 20, needs_gpu=True),
    Part("parity", "runtime torch against runtime llvm", "faser_backend.lab.gpu.parity:torch_runtime", 50),
    Part("rtx", "TensorRT-RTX", "faser_backend.lab.gpu.parity:rtx_runtime", 60),
    Part("tensorrt", "full TensorRT", "faser_backend.lab.gpu.parity:tensorrt_runtime", 65),
)  # fmt: skip
PARTS_BY_NAME = {part.name: part for part in PARTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Write to this file, not benchmarks/results/gpu-NAME-DATE.json.")
    parser.add_argument("--parts", help="Run these parts, separated by commas.", default=",".join(PARTS_BY_NAME))
    parser.add_argument("--budget-s", type=float, default=FULL_BUDGET_S, help="Finish in this many seconds.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="Check the script with tiny shapes; measure nothing.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="Serve this checkpoint, not a planted pair.")
    parser.add_argument("--table", type=Path, metavar="FILE", help="Print a results file and exit.")
    options = parser.parse_args()
    if options.table is not None:
        print(render(json.loads(options.table.read_text())), end="")
        return 0
    if options.budget_s <= 0:
        parser.error(f"--budget-s = {options.budget_s:g}: must be positive")
    wanted = [name.strip() for name in options.parts.split(",")]
    for name in wanted:
        if name not in PARTS_BY_NAME:
            parser.error(f"--parts = {name!r}: unknown; known are {', '.join(PARTS_BY_NAME)}")
    gpu = query_gpu() if options.device == "cuda" else {}
    if options.device == "cuda" and not gpu and not GPU_DEVICE.exists():
        parser.exit(1, "no GPU: nvidia-smi finds none; --device cpu --tiny checks the script only\n")
    setting = Setting(
        options.device, options.tiny, options.seed, str(options.checkpoint.absolute()) if options.checkpoint else ""
    )
    meta = describe(setting, gpu)
    report = Report(options.output or default_path(meta), meta | {"budget_s": options.budget_s})

    def record(name: str, outcome: Outcome) -> None:
        report.record(name, outcome)
        last = outcome.error.splitlines()[-1] if outcome.error else ""
        print(f"{name:12} {outcome.status:10} {outcome.seconds:6.1f} s  {last}", file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a child on the GPU is ended too
    parts = [part for part in PARTS if part.name in wanted]
    run_parts(parts, setting, options.budget_s, options.budget_s / FULL_BUDGET_S, record)
    if options.device == "cuda":
        report.content["meta"]["gpu_at_end"] = query_gpu()
        report.save()
    print(render(report.content), end="")
    print(f"\nwritten to {report.path}", file=sys.stderr)
    failed = [part for part in report.content["parts"].values() if part["status"] in ("failed", "timed out", "died")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
