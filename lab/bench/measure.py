"""Runs the ladder: every contestant under every load, at once and in turns, over the same jobs.

Gives a row of figures per contestant, load and temperature, and the course of its last repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.bench import accounting
from lab.bench.accounting import StepLog
from lab.bench.categories import (
    Categories,
    add_category_speedups,
    merge_categories,
    summarise_categories,
)
from lab.bench.in_process import ClosedLoop, Feed, InProcess, OpenLoop
from lab.bench.ladder import LOADS, MAX_NUM_SEQS, REFERENCE, Contestant, Load, Sizing
from lab.bench.prompt_files import Prompt
from lab.bench.prompts import PromptMaker, make_lengths, picked
from lab.bench.turns import turn_orders
from lab.bench.workload import (
    Job,
    Trace,
    count_different,
    jobs_of,
    merge_repeats,
    summarise,
)
from lab.simulation.trace import Trace as RequestTrace
from lab.simulation.trace import fitted_to, with_rate_curve

PEAK_TO_TROUGH = 35.0  # of the arrival rate, as in the trace that the FASER paper replays
BURSTY_SHARE = 0.5  # mean arrival rate, as a share of what the reference sustains when saturated
NUM_SERIES_BINS = 40

Report = Callable[[str, float], None]  # what is running; how many runs more are done, in whole or in part


@dataclass(frozen=True, slots=True)
class Workload:
    """What contestants are asked: prompts in closed loops, and the lengths of a bursty trace."""

    prompts: list[Prompt]
    maker: PromptMaker
    lengths: RequestTrace | None  # None: made up
    max_context: int
    seed: int


@dataclass(slots=True)
class Results:
    """What a ladder came to; `bursty` describes the arrivals of each temperature's bursty load."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    series: list[dict[str, Any]] = field(default_factory=list)
    bursty: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is run in turns: contestants, and the jobs that each of them gets."""

    load: Load
    temperature: float
    contestants: list[Contestant]
    jobs: list[Job]
    feed: Feed


class _Progress:
    """Of runs in turns, passed on as it grows."""

    def __init__(self, report: Report, what: str, num_runs: int) -> None:
        self._report, self._what, self._num_runs = report, what, num_runs
        self._share = 0.0

    def __call__(self, share: float) -> None:
        self._report(self._what, (share - self._share) * self._num_runs)
        self._share = share


class Ladder:
    """Contestants on loaded engines. `report` is told of progress, `num_runs` in all."""

    def __init__(
        self, place: InProcess, contestants: list[Contestant], workload: Workload, num_layers: int, report: Report
    ) -> None:
        self._place = place
        self._contestants = contestants
        self._workload = workload
        self._num_layers = num_layers
        self._report = report
        self._logs = {contestant.name: StepLog(place.engine(contestant.name)) for contestant in contestants}

    @staticmethod
    def num_runs(contestants: list[Contestant], sizing: Sizing) -> int:
        """How many runs `report` will be told of in all."""
        per_load = [len(taking_part(contestants, load, sizing)) * (sizing.repeats_of(load) + 1) for load in LOADS]
        return sum(per_load) * len(sizing.temperatures)

    def run(self, sizing: Sizing) -> Results:
        """All loads at all temperatures."""
        results = Results()
        for temperature in sizing.temperatures:
            for load in LOADS:
                present = taking_part(self._contestants, load, sizing)
                if load.is_open:
                    jobs, feed, described = self._bursty(sizing, temperature)
                    results.bursty.append({"temperature": temperature, **described})
                else:
                    jobs, feed = self._closed(load, sizing, temperature)
                results.rows += self._measure(
                    Cell(load, temperature, present, jobs, feed), sizing.repeats_of(load), results
                )
        return results

    def _measure(self, cell: Cell, repeats: int, results: Results) -> list[dict[str, Any]]:
        load, temperature, contestants, jobs = cell.load, cell.temperature, cell.contestants, cell.jobs
        where = {"load": load.name, "temperature": temperature}
        shown = f"{load.name}, T={temperature:g}"
        names = [contestant.name for contestant in contestants]
        # Allocations, first calls of shapes, and what adaptive policies have to find out are not measured.
        self._place.serve_in_turns(names, jobs, cell.feed, _Progress(self._report, f"{shown}: warming up", len(names)))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        categories: dict[str, list[Categories]] = {name: [] for name in names}
        answers: dict[str, list[Trace]] = {}
        for repeat, order in enumerate(turn_orders(names, repeats), 1):
            for name in names:
                self._logs[name].start()
            progress = _Progress(self._report, f"{shown}: {repeat} of {repeats}", len(names))
            for name, (traces, seconds) in self._place.serve_in_turns(order, jobs, cell.feed, progress).items():
                answers[name] = traces
                found[name].append(summarise(traces, seconds) | accounting.figures(self._logs[name], self._num_layers))
                categories[name].append(summarise_categories(jobs, traces))
        rows = []
        for contestant in contestants:
            name = contestant.name
            rows.append(
                {
                    "policy": name,
                    **where,
                    "num_clients": load.num_clients,
                    "num_jobs": len(jobs),
                    "spec": contestant.policy,
                    "options": contestant.options,
                    **merge_repeats(found[name]),
                    "num_different": count_different(answers[name], answers[REFERENCE]),
                    "categories": merge_categories(categories[name]),
                }
            )
            course = accounting.series(self._logs[name].notes, NUM_SERIES_BINS)
            results.series.append({"policy": name, **where, **course})
        reference = next(row for row in rows if row["policy"] == REFERENCE)
        for row in rows:
            add_category_speedups(row["categories"], reference["categories"])
        return rows

    def _closed(self, load: Load, sizing: Sizing, temperature: float) -> tuple[list[Job], Feed]:
        """As many whole waves of jobs as keep the reference busy for sizing.cell_s; min_waves at least, and enough to
        ask something of every category."""
        count, prompts = load.num_clients, self._workload.prompts
        trial = jobs_of(prompts, count, sizing.max_tokens, temperature, self._workload.seed)
        self._place.run(REFERENCE, trial[: max(1, count // 4)], count)
        _, seconds = self._place.run(REFERENCE, trial, count)
        num_categories = len({prompt.category for prompt in prompts})
        num_waves = max(sizing.min_waves, round(sizing.cell_s / seconds), -(-num_categories // count))
        jobs = jobs_of(prompts, num_waves * count, sizing.max_tokens, temperature, self._workload.seed)
        return jobs, ClosedLoop(count)

    def _bursty(self, sizing: Sizing, temperature: float) -> tuple[list[Job], Feed, dict[str, Any]]:
        """Requests in bursts, at a stated share of the rate at which the reference answers such requests."""
        workload, seed = self._workload, self._workload.seed
        rng = np.random.default_rng(seed)
        lengths = fitted_to(workload.lengths or make_lengths(4096, rng), workload.max_context)
        trial = self._jobs_of(picked(lengths, 2 * MAX_NUM_SEQS, rng), temperature)
        _, seconds = self._place.run(REFERENCE, trial, MAX_NUM_SEQS)
        rate = BURSTY_SHARE * len(trial) / seconds
        count = max(2, round(rate * sizing.bursty_s))
        trace = with_rate_curve(picked(lengths, count, rng), rate, PEAK_TO_TROUGH, seed)
        described = {
            "arrivals": trace.description,
            "lengths": lengths.description,
            "requests_per_s": rate,
            "share_of_saturation": BURSTY_SHARE,
            "saturated_requests_per_s": len(trial) / seconds,
            "peak_to_trough": PEAK_TO_TROUGH,
            "seed": seed,
        }
        return self._jobs_of(trace, temperature), OpenLoop(trace.arrivals_s.tolist()), described

    def _jobs_of(self, trace: RequestTrace, temperature: float) -> list[Job]:
        workload = self._workload
        pairs = zip(trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist(), strict=True)
        return [
            Job(workload.maker.prompt(num_prompt, index), num_output, temperature, workload.seed + index)
            for index, (num_prompt, num_output) in enumerate(pairs)
        ]


def taking_part(contestants: list[Contestant], load: Load, sizing: Sizing) -> list[Contestant]:
    """Everyone, but in a short run the ablations sit out the bursty load, which takes real time."""
    if load.is_open and not sizing.bursty_ablations:
        return [contestant for contestant in contestants if not contestant.options]
    return contestants
