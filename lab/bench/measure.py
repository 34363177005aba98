"""Measures contestants that alternate over the same jobs, and runs the ladder of `faser bench`, load by load.

A contestant is an engine in this process, a server, or another program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from faser_backend.lab.answers import (
    Answer,
    Categories,
    Job,
    add_category_speedups,
    count_different,
    jobs_of,
    merge_categories,
    merge_repeats,
    summarise,
    summarise_categories,
)
from faser_backend.lab.bench.plan import CLOSED_LOADS, PROBE_TOKENS, Speed
from faser_backend.lab.contestants import LOADS, MAX_NUM_SEQS, REFERENCE, Contestant, Load, Sizing, taking_part
from faser_backend.lab.drive import ClosedLoop, Feed, InProcess, OpenLoop, turn_orders
from faser_backend.lab.prompts import PromptMaker
from faser_backend.lab.steps import StepLog, figures
from faser_backend.lab.traces import Trace, fitted_to, make_lengths, picked, with_rate_curve
from faser_backend.text.prompts import Prompt

PEAK_TO_TROUGH = 35.0  # of the arrival rate, as in the trace that the FASER paper replays
BURSTY_SHARE = 0.5  # mean arrival rate, as a share of what the reference sustains when saturated

Served = tuple[list[Answer], float]  # an answer per job, and seconds
Serve = Callable[[Sequence[str]], Iterable[tuple[str, Served]]]  # lets contestants answer the jobs, in this order


def measure(
    serve: Serve,
    names: Sequence[str],
    jobs: Sequence[Any],
    repeats: int,
    *,
    more: Callable[[str], dict[str, float]] = lambda name: {},
    before: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Returns a row per contestant, with medians over the repeats. The first contestant is the reference, whose answers
    and speed the others are compared with. The order rotates from repeat to repeat.

    before: called before a contestant's run. more: returns further figures of the run that just ended. A contestant
    that is served in no repeat has no row.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    categories: dict[str, list[Categories]] = {name: [] for name in names}
    answers: dict[str, list[Answer]] = {}
    for order in turn_orders(names, repeats):
        for name in order:
            before(name)
        for name, (answers[name], seconds) in serve(order):
            found[name].append(summarise(answers[name], seconds) | more(name))
            if isinstance(jobs[0], Job):
                categories[name].append(summarise_categories(jobs, answers[name]))
    rows = []
    for name in filter(found.__getitem__, names):
        row = {"policy": name, **merge_repeats(found[name]), "repeats": len(found[name])}
        row["tokens_per_s_min"], row["tokens_per_s_max"] = (end(row["tokens_per_s_repeats"]) for end in (min, max))
        row["num_different"] = count_different(answers[name], answers[names[0]]) if names[0] in answers else None
        row["categories"] = merge_categories(categories[name]) if categories[name] else {}
        rows.append(row)
    for row in reversed(rows):
        row["speedup"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
        add_category_speedups(row["categories"], rows[0]["categories"])
    return rows


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of closed loops, and the lengths of a bursty trace."""

    prompts: list[Prompt]
    maker: PromptMaker
    lengths: Trace | None  # None: synthetic
    max_context: int
    seed: int


def reference_speeds(place: InProcess, workload: Workload) -> dict[str, Speed]:
    """Measures the reference under each closed load, with one wave of short answers."""
    found = {}
    for load in CLOSED_LOADS:
        jobs = jobs_of(workload.prompts, load.num_clients, PROBE_TOKENS, 0.8, workload.seed)
        found[load.name] = Speed.of(*place.run(REFERENCE, jobs, load.num_clients))
    return found


@dataclass(slots=True)
class Ladder:
    """Measurements of loaded engines: rows of bench.json, arrivals of bursty loads, and loads that had no time.

    report: takes what is running and how many more of `num_runs` runs are done, fractions included.
    """

    place: InProcess
    contestants: list[Contestant]
    workload: Workload
    sizing: Sizing
    report: Callable[[str, float], None]
    num_layers: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    bursty: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _logs: dict[str, StepLog] = field(init=False)

    def __post_init__(self) -> None:
        self._logs = {each.name: StepLog(self.place.engine(each.name)) for each in self.contestants}

    @property
    def num_runs(self) -> int:
        num_runs = sum(len(taking_part(self.contestants, load, self.sizing)) for load in LOADS)
        return num_runs * (self.sizing.repeats + 1) * len(self.sizing.temperatures)

    def run(self, has_time: Callable[[Load], bool] = lambda load: True) -> None:
        """Measures each load at each temperature. After the first, leaves out loads for which there is no time."""
        for temperature in self.sizing.temperatures:
            for load in LOADS:
                if self.rows and not has_time(load):
                    self.left_out.append(f"{load.name}, T={temperature:g}")
                    continue
                jobs, feed = self._bursty(temperature) if load.is_open else self._closed(load, temperature)
                self._measure(load, temperature, jobs, feed)

    def _measure(self, load: Load, temperature: float, jobs: list[Job], feed: Feed) -> None:
        by_name = {each.name: each for each in taking_part(self.contestants, load, self.sizing)}

        def serve(order: Sequence[str]) -> Iterable[tuple[str, Served]]:
            reported = 0.0

            def on_turn(share: float) -> None:
                nonlocal reported
                self.report(f"{load.name}, T={temperature:g}", (share - reported) * len(order))
                reported = share

            return self.place.serve_in_turns(order, jobs, feed, on_turn).items()

        serve(list(by_name))  # allocations, first calls of shapes and what adaptive policies learn are not measured

        def more(name: str) -> dict[str, float]:
            return figures(self._logs[name], self.num_layers)

        where = {"load": load.name, "temperature": temperature, "num_clients": load.num_clients, "num_jobs": len(jobs)}
        rows = measure(
            serve, list(by_name), jobs, self.sizing.repeats, more=more, before=lambda name: self._logs[name].start()
        )
        for row in rows:
            each = by_name[row["policy"]]
            self.rows.append(row | where | {"spec": each.policy, "options": each.options})

    def _closed(self, load: Load, temperature: float) -> tuple[list[Job], Feed]:
        """Returns whole waves of jobs that keep the reference busy for sizing.loop_s."""
        sizing, count, prompts, seed = self.sizing, load.num_clients, self.workload.prompts, self.workload.seed
        trial = jobs_of(prompts, count, sizing.max_tokens, temperature, seed)
        self.place.run(REFERENCE, trial[: max(1, count // 4)], count)
        _, seconds = self.place.run(REFERENCE, trial, count)
        num_waves = max(sizing.waves_of(load), round(sizing.loop_s / seconds))
        return jobs_of(prompts, num_waves * count, sizing.max_tokens, temperature, seed), ClosedLoop(count)

    def _bursty(self, temperature: float) -> tuple[list[Job], Feed]:
        """Returns requests in bursts, at a share of the rate at which the reference answers such requests."""
        workload, seed = self.workload, self.workload.seed
        rng = np.random.default_rng(seed)
        lengths = fitted_to(workload.lengths or make_lengths(4096, rng), workload.max_context)
        trial = self._jobs_of(picked(lengths, 2 * MAX_NUM_SEQS, rng), temperature)
        _, seconds = self.place.run(REFERENCE, trial, MAX_NUM_SEQS)
        rate = BURSTY_SHARE * len(trial) / seconds
        count = max(2, round(rate * self.sizing.bursty_s))
        trace = with_rate_curve(picked(lengths, count, rng), rate, PEAK_TO_TROUGH, seed)
        self.bursty.append({
            "temperature": temperature,
            "arrivals": trace.description,
            "lengths": lengths.description,
            "requests_per_s": rate,
            "share_of_saturation": BURSTY_SHARE,
            "saturated_requests_per_s": len(trial) / seconds,
            "peak_to_trough": PEAK_TO_TROUGH,
            "seed": seed,
        })  # fmt: skip
        return self._jobs_of(trace, temperature), OpenLoop(trace.arrivals_s.tolist())

    def _jobs_of(self, trace: Trace, temperature: float) -> list[Job]:
        return trace_jobs(trace, self.workload.maker, temperature, self.workload.seed)


def trace_jobs(trace: Trace, maker: PromptMaker, temperature: float, seed: int) -> list[Job]:
    """Returns a job per request of the trace. Job i samples with seed + i."""
    pairs = zip(trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist(), strict=True)
    return [
        Job(maker.prompt(num_prompt, index), num_output, temperature, seed + index)
        for index, (num_prompt, num_output) in enumerate(pairs)
    ]
