"""Alternates policies and mechanisms on the demo pair with runtime torch: effects of drafts, exits and overlap.

The pair is far too small for a GPU: its ratios show that the mechanisms work, not what they gain.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

from faser_backend.core.config import EngineConfig
from faser_backend.engines.build import build_engines
from faser_backend.lab.answers import jobs_of
from faser_backend.lab.bench.measure import measure
from faser_backend.lab.contestants import choose_contestants
from faser_backend.lab.drive import ClosedLoop, InProcess
from faser_backend.lab.gpu.harness import Context, Result
from faser_backend.lab.gpu.pairs import DTYPE, checked_device
from faser_backend.lab.prompts import DEMO_PROMPTS
from faser_backend.lab.steps import StepLog, figures
from faser_backend.manifest import EngineManifest
from faser_backend.profiling.profile import run_profile
from faser_backend.serving.model_source import DEMO_PAIR
from faser_backend.text.prompts import read_prompts

FIELDS = (
    "policy", "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max", "speedup", "e2e_ms_p50", "ttft_ms_p50",
    "tpot_ms_p50", "itl_ms_p99", "mean_accepted", "rows_trimmed", "rows_pruned", "retention", "share_serial",
    "overlap_share", "plan_us_p50", "plan_share", "step_overhead_share", "num_different",
)  # fmt: skip
NAMES = ["none", "fixed:4", "faser", "fixed:4 (run-ahead)", "fixed:4 (ping-pong)"]


def demo(context: Context) -> Result:
    checked_device(context)
    found: Result = {}
    loads, max_tokens, repeats = ((1, 2), 8, 1) if context.is_tiny else ((1, 8, 32), 64, 2)
    with tempfile.TemporaryDirectory(prefix="faser-ladder-") as folder:
        engine_dir = Path(folder, "engine")
        dtype = DTYPE[context.device]
        build_engines(DEMO_PAIR / "target", DEMO_PAIR / "draft", engine_dir, runtime="torch", dtype=dtype)
        if not context.is_tiny:  # takes minutes on a CPU; without a profile policies use defaults
            run_profile(engine_dir, is_quick=True, budget_s=context.time_left_s / 3)
        num_layers = EngineManifest.load(engine_dir).target.spec.num_layers
        with closing(InProcess(engine_dir, {})) as place:
            for each in choose_contestants(NAMES)[0]:
                config = EngineConfig.from_options(
                    policy=each.policy, max_num_seqs=max(loads), enable_prefix_reuse=False, **each.options
                )
                place.open(each.name, config)
            logs = {name: StepLog(place.engine(name)) for name in NAMES}
            for clients in loads:
                jobs = jobs_of(read_prompts(DEMO_PROMPTS), 2 * clients, max_tokens, 0.8, context.seed)
                place.serve_in_turns(NAMES, jobs, ClosedLoop(clients))  # warm-up: captures and first calls
                rows = measure(
                    lambda order, jobs=jobs, clients=clients: place.serve_in_turns(
                        order, jobs, ClosedLoop(clients)
                    ).items(),
                    NAMES,
                    jobs,
                    repeats,
                    more=lambda name: figures(logs[name], num_layers),
                    before=lambda name: logs[name].start(),
                )
                found[f"{clients} clients"] = [{name: row[name] for name in FIELDS if name in row} for row in rows]
                context.save(found)
    return found
