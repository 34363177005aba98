"""What scheduler and policy cost per step: every registered policy at batch 1, 8 and 32, without models.

The real engine steps in virtual time (lab/simulation); a stopwatch of real time lies around everything that a policy or
the scheduler decides. The table shows microseconds per step.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.decision import Decision
from faser_backend.core.request import Request, SamplingParams
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy import trim
from faser_backend.policy.registry import policy_usages
from faser_backend.policy.speculation import SpeculationPolicy
from lab import environment
from lab.drive import ClosedLoop, serve_requests
from lab.options import integers, make_parser
from lab.simulation.engine import build_sim_engine
from lab.simulation.worlds import roofline_world
from lab.steps import StepLog, figures
from lab.tables import Column, markdown_table, write_results

EXAMPLES = {"fixed": "fixed:4", "schedule": "schedule:4:4,8:2,32:1"}  # of policies that take an argument
PARTS = ("schedule", "decide", "trim", "exit", "observe")
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 100, 100
COLUMNS = (
    Column("policy", lambda row: f"`{row['policy']}`"),
    Column("batch", "batch"),
    Column("drafted", "mean_drafted"),
    *(Column(part, f"{part}_us_p50", "{:.0f}") for part in PARTS),
    Column("all, p50", "total_us_p50", "{:.0f}"),
    Column("all, p99", "total_us_p99", "{:.0f}"),
)


class Stopwatch:
    """Nanoseconds per part of a step, wherever its functions are called from."""

    def __init__(self) -> None:
        self._spent_ns: dict[str, int] = defaultdict(int)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return function(*args, **options)
            finally:
                self._spent_ns[part] += time.perf_counter_ns() - start

        return run

    def take(self) -> list[int]:
        """Of the step that just ended, by part."""
        self._spent_ns["schedule"] -= self._spent_ns["decide"]  # the scheduler asks the policy
        spent = [self._spent_ns[part] for part in PARTS]
        self._spent_ns.clear()
        return spent


class TimedPolicy:
    """A policy whose decisions are timed, those of its pruner too."""

    def __init__(self, policy: SpeculationPolicy, watch: Stopwatch) -> None:
        self.is_drafting, self.partitions = policy.is_drafting, policy.partitions
        self.observe = watch.timed("observe", policy.observe)
        self._decide, self._watch = watch.timed("decide", policy.decide), watch

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        decision = self._decide(sequences, num_coming)
        if decision.pruner is None:
            return decision
        inner = decision.pruner
        keep = self._watch.timed("exit", inner.keep)
        return replace(
            decision, pruner=SimpleNamespace(exits=inner.exits, num_candidates=inner.num_candidates, keep=keep)
        )


def registered_policies() -> list[str]:
    """Every registered policy of chains, with an example of its argument where it takes one."""
    usages = {name: usage for name, usage in policy_usages().items() if name != "tree"}
    missing = [usage for name, usage in usages.items() if ":" in usage and name not in EXAMPLES]
    if missing:
        raise SystemExit(f"EXAMPLES of lab/bench/policies.py lacks an argument for {', '.join(missing)}")
    return [EXAMPLES.get(name, name) for name in usages]


@contextmanager
def trimming_timed(watch: Stopwatch) -> Iterator[None]:
    """What a step asks of policy/trim.py between model calls is timed, wherever the pipeline imported it."""
    pipeline = [module for name, module in sys.modules.items() if name.startswith("faser_backend.pipeline.")]
    kept = [
        (module, name, function)
        for name, function in vars(trim).items()
        if callable(function) and getattr(function, "__module__", "") == trim.__name__
        for module in pipeline
        if getattr(module, name, None) is function
    ]
    for module, name, function in kept:
        setattr(module, name, watch.timed("trim", function))
    try:
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def measure(policy: str, batch: int, num_steps: int, num_warm: int, seed: int) -> dict[str, Any]:
    """One row: medians per part, median and 99th percentile of their sum, in microseconds."""
    watch = Stopwatch()
    world = roofline_world("h100", "qwen3-8b/0.6b", max_context=NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS)
    config = EngineConfig.from_options(policy=policy, max_num_seqs=batch, max_prefill_tokens=256, max_queue_size=0)
    sim = build_sim_engine(world, config, seed=seed, max_output_tokens=NUM_OUTPUT_TOKENS)
    scheduler = sim.engine.stepper.scheduler
    timed = TimedPolicy(scheduler.policy, watch)
    scheduler.policy = timed
    scheduler.schedule = watch.timed("schedule", scheduler.schedule)
    sim.observers[0] = timed.observe
    log = StepLog(sim.engine, with_laps=False)
    prompt = np.zeros(NUM_PROMPT_TOKENS, np.int64)
    requests = [
        Request(str(index), prompt, NUM_OUTPUT_TOKENS, SamplingParams(seed=index))
        for index in range(batch * (2 + (num_steps + num_warm) // 10))  # a step emits nine tokens of each at most
    ]
    rows = []
    with trimming_timed(watch):
        for _ in serve_requests(sim.engine, sim.clock, requests, ClosedLoop(batch)):
            rows.append(watch.take())
            if len(rows) == num_warm + num_steps:
                break
    scheduler.check_integrity()
    spent_us = np.array(rows[num_warm:]) / 1e3  # [steps, parts]
    total = spent_us.sum(axis=1)
    mean_drafted = figures(log, sim.num_layers)["mean_length"]
    row: dict[str, Any] = {"policy": policy, "batch": batch, "mean_drafted": round(mean_drafted, 2)}
    row |= {f"{part}_us_p50": float(us) for part, us in zip(PARTS, np.median(spent_us, axis=0).round(1), strict=True)}
    return row | {"total_us_p50": float(np.median(total)), "total_us_p99": float(np.percentile(total, 99))}


def main() -> None:
    parser = make_parser(__doc__, "seed", "output", name="policies")
    parser.add_argument("--policies", help="default: every registered policy, separated by blanks")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--steps", type=int, default=1000, help="steps that are counted")
    parser.add_argument("--warmup", type=int, default=100, help="steps before them")
    args = parser.parse_args()
    policies = args.policies.split() if args.policies else registered_policies()
    meta = environment.describe(args.seed) | {"num_steps": args.steps, "warmup": args.warmup}
    rows = [
        measure(policy, batch, args.steps, args.warmup, args.seed)
        for policy in policies
        for batch in integers(args.batches)
    ]
    notes = (
        f"Microseconds per step over {args.steps} steps in virtual time, without models; medians but for the last "
        "column. `schedule` is the scheduler without the policy's `decide`; `trim` and `exit` are what a step decides "
        "between model calls; `drafted` is the mean number of draft tokens per request and step that the policy ended "
        "with."
    )
    lines = [notes, "", *markdown_table(COLUMNS, rows)]
    print(write_results(args.output / args.name, "What scheduler and policy cost per step", meta, lines, rows))


if __name__ == "__main__":
    main()
