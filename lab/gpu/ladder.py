"""A short `faser bench` of the demo pair on runtime torch: what policies, exits and overlap do on this device.

The pair is far too small for a GPU: its ratios say whether the mechanisms work there, not what they are worth.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from engines.build import build_engines
from faser_backend.serving.demo_engine import DEMO_PAIR
from lab.bench.command import BenchOptions, run_bench
from lab.contestants import Sizing
from lab.gpu.pairs import DTYPE, checked_device
from lab.gpu.worker import Context, Result
from lab.profiling.profile import run_profile

POLICIES = "none,fixed:4,faser,fixed:4 (run-ahead),fixed:4 (ping-pong)"
SPARE_S = 5.0  # for writing the report


def demo(context: Context) -> Result:
    checked_device(context)
    with tempfile.TemporaryDirectory(prefix="faser-ladder-") as folder:
        engine_dir, output = Path(folder, "engine"), Path(folder, "bench")
        dtype = DTYPE[context.device]
        build_engines(DEMO_PAIR / "target", DEMO_PAIR / "draft", engine_dir, runtime="torch", dtype=dtype)
        run_profile(engine_dir, is_quick=True, budget_s=context.time_left_s / 2)
        options = BenchOptions(
            output, engine_dir, POLICIES, seed=context.seed, budget_s=max(1.0, context.time_left_s - SPARE_S)
        )
        run_bench(options, Sizing.quick(), command="scripts/gpu_check.py")
        found = json.loads((output / "bench.json").read_text())
    return {"missing": found["meta"]["missing"], "rows": found["rows"]}
