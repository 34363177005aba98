"""Contestants under a load, in turns over the same jobs; and the ladder of `faser bench`, load after load.

Knows nothing of what a contestant is: an engine of ours in this process, a server, or a program of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.answers import (
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
from lab.bench.estimate import PROBE_TOKENS, Speed, closed_loads
from lab.contestants import LOADS, MAX_NUM_SEQS, REFERENCE, Contestant, Load, Sizing, taking_part
from lab.drive import ClosedLoop, Feed, InProcess, OpenLoop, turn_orders
from lab.prompts import Prompt, PromptMaker
from lab.steps import StepLog, figures, series
from lab.traces import Trace, fitted_to, make_lengths, picked, with_rate_curve

PEAK_TO_TROUGH = 35.0  # of the arrival rate, as in the trace that the FASER paper replays
BURSTY_SHARE = 0.5  # mean arrival rate, as a share of what the reference sustains when saturated
NUM_SERIES_BINS = 40

Report = Callable[[str, float], None]  # what is running; how many runs more are done, in whole or in part
Served = tuple[list[Answer], float]  # an answer per job, and seconds
Serve = Callable[[Sequence[str]], Iterable[tuple[str, Served]]]  # has contestants answer the jobs, in this order


def measure(
    serve: Serve,
    names: Sequence[str],
    jobs: Sequence[Any],
    repeats: int,
    *,
    more: Callable[[str], dict[str, float]] = lambda name: {},
    before: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """A row per contestant, medians over the repeats, each of which another one begins. The first one's answers and
    speed are what the others' are held against.

    before, more: what is done before a contestant's run, and figures of the run that just ended. One that is not
    served in any repeat has no row.
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
        first = rows[0] if rows else row
        row["speedup"] = row["tokens_per_s"] / first["tokens_per_s"]
        rows.append(row)
    for row in reversed(rows):
        add_category_speedups(row["categories"], rows[0]["categories"])
    return rows


@dataclass(frozen=True, slots=True)
class Workload:
    """What contestants are asked: prompts in closed loops, and the lengths of a bursty trace."""

    prompts: list[Prompt]
    maker: PromptMaker
    lengths: Trace | None  # None: made up
    max_context: int
    seed: int


@dataclass(slots=True)
class Results:
    """What a ladder came to; `bursty` describes the arrivals of each temperature's bursty load."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    series: list[dict[str, Any]] = field(default_factory=list)
    bursty: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # loads for which there was no time


def reference_speeds(place: InProcess, workload: Workload) -> dict[str, Speed]:
    """How fast the reference is under each closed load: one wave of short answers."""
    found = {}
    for load in closed_loads():
        jobs = jobs_of(workload.prompts, load.num_clients, PROBE_TOKENS, 0.8, workload.seed)
        found[load.name] = Speed.of(*place.run(REFERENCE, jobs, load.num_clients))
    return found


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

    def run(self, sizing: Sizing, results: Results, has_time: Callable[[Load], bool] = lambda load: True) -> None:
        """All loads at all temperatures into `results`, load by load; behind the first, those for which there is no
        time are left out, by name."""
        for temperature in sizing.temperatures:
            for load in LOADS:
                if results.rows and not has_time(load):
                    results.left_out.append(f"{load.name}, T={temperature:g}")
                    continue
                if load.is_open:
                    jobs, feed, described = self._bursty(sizing, temperature)
                    results.bursty.append({"temperature": temperature, **described})
                else:
                    jobs, feed = self._closed(load, sizing, temperature)
                where = {"load": load.name, "temperature": temperature, "num_clients": load.num_clients}
                present = taking_part(self._contestants, load, sizing)
                self._measure(present, jobs, feed, sizing.repeats_of(load), where=where, results=results)

    def _measure(
        self,
        present: list[Contestant],
        jobs: list[Job],
        feed: Feed,
        repeats: int,
        *,
        where: dict[str, Any],
        results: Results,
    ) -> None:
        shown, by_name = f"{where['load']}, T={where['temperature']:g}", {each.name: each for each in present}

        def serve(order: Sequence[str]) -> Iterable[tuple[str, Served]]:
            told = 0.0

            def on_turn(share: float) -> None:
                nonlocal told
                self._report(shown, (share - told) * len(order))
                told = share

            return self._place.serve_in_turns(order, jobs, feed, on_turn).items()

        serve(
            list(by_name)
        )  # allocations, first calls of shapes, and what adaptive policies find out, are not measured
        for row in measure(
            serve,
            list(by_name),
            jobs,
            repeats,
            more=lambda name: figures(self._logs[name], self._num_layers),
            before=lambda name: self._logs[name].start(),
        ):
            contestant = by_name[row["policy"]]
            own = {"num_jobs": len(jobs), "spec": contestant.policy, "options": contestant.options}
            results.rows.append(row | where | own)
            course = series(self._logs[contestant.name].notes, NUM_SERIES_BINS)
            results.series.append({"policy": contestant.name, **where, **course})

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

    def _jobs_of(self, trace: Trace, temperature: float) -> list[Job]:
        workload = self._workload
        pairs = zip(trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist(), strict=True)
        return [
            Job(workload.maker.prompt(num_prompt, index), num_output, temperature, workload.seed + index)
            for index, (num_prompt, num_output) in enumerate(pairs)
        ]
