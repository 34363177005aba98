"""Simulates closed loops of the demo pair on this machine and runs them for real: predicted beside measured.

In rounds: a copy of the demo engine is profiled, then every loop runs once. A shared machine is up to twice as slow
from one half minute to the next, so two small loads tell its pace (class Pace), between the calls of the
profile and in turns with every run; a prediction is for the pace of the run that it is held against. The texts are
others than those that the acceptance process was fitted to: same prompts, other seeds. Five minutes a round.
"""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from faser_backend.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.request import Request
from faser_backend.serving.demo_engine import demo_engine_dir
from lab import environment
from lab.answers import Job, jobs_of, summarise
from lab.drive import ClosedLoop, InProcess
from lab.options import integers, make_parser
from lab.profiling.profile import profile_engine
from lab.prompts import DEMO_PROMPTS, interleaved, read_prompts
from lab.simulation.engine import World, build_sim_engine, run_closed_loop
from lab.simulation.worlds import profile_world
from lab.tables import Column, markdown_table, write_results
from lab.traces import Trace

PACE_POLICIES = ("none", "fixed:4")
PACE_SEQUENCES = 4
PACE_TURN_S = 0.05  # of each load
GOAL = 0.15  # of the measured throughput
FIRST_SEED = 10_000  # far from the seeds of the fit
NUM_JOBS = 48  # of a loop; acceptance differs from text to text, so each round has texts of its own
PACE_TURNS = 10  # whenever the profile has measured some dozens of calls
MAX_PROMPT_CHARS = 1000
FIGURES = ("tokens_per_s", "mean_accepted", "tpot_ms_p50", "ttft_ms_p50")

Figures = dict[tuple[int, str], dict[str, float]]  # by number of clients and policy


class Pace:
    """Tokens per second of both loads, their geometric mean, over as many turns as were taken."""

    def __init__(self, engine_dir: Path, jobs: list[Job]) -> None:
        options = {"enable_prefix_reuse": False, "max_num_seqs": PACE_SEQUENCES}
        configs = {policy: EngineConfig.from_options(policy=policy, **options) for policy in PACE_POLICIES}
        self._place = InProcess(engine_dir, configs)
        self._requests = {policy: self._without_end(jobs) for policy in PACE_POLICIES}
        self._num_running = dict.fromkeys(PACE_POLICIES, 0)
        self.start()
        for _ in range(10):  # first calls of shapes are not measured
            self.take_turn()

    def close(self) -> None:
        self._place.close()

    def start(self) -> None:
        """What was measured before does not count."""
        self._num_tokens, self._seconds = dict.fromkeys(PACE_POLICIES, 0), dict.fromkeys(PACE_POLICIES, 0.0)

    def take_turn(self) -> None:
        """Runs whole steps of each load for a moment, with so many requests in flight."""
        for policy in PACE_POLICIES:
            engine = self._place.engine(policy)
            start = now = time.perf_counter()
            while now - start < PACE_TURN_S:
                for _ in range(self._num_running[policy], PACE_SEQUENCES):
                    engine.submit(next(self._requests[policy]))
                outputs = engine.step()
                self._num_running[policy] = PACE_SEQUENCES - sum(output.is_final for output in outputs)
                self._num_tokens[policy] += sum(len(output.token_ids) for output in outputs)
                now = time.perf_counter()
            self._seconds[policy] += now - start

    def tokens_per_s(self) -> float:
        """Since `start`, after one turn at least."""
        return math.prod(self._num_tokens[p] / self._seconds[p] for p in PACE_POLICIES) ** (1 / len(PACE_POLICIES))

    def _without_end(self, jobs: list[Job]) -> Iterator[Request]:
        """The jobs over and over, under ever new names."""
        for index, job in enumerate(itertools.cycle(jobs)):
            yield replace(self._place.request(0, job), request_id=f"pace-{index}")


def options_of(policy: str) -> dict[str, Any]:
    return {"policy": policy, "enable_prefix_reuse": False, "max_num_seqs": 16, "max_queue_size": 0}


def measure(engine_dir: Path, policies: list[str], loops: dict[int, list[Job]], first: int, pace: Pace) -> Figures:
    """Figures of each policy in each loop, run once, in turns with the pace; the policy at place `first` begins."""
    found: Figures = {}
    configs = {policy: EngineConfig.from_options(**options_of(policy)) for policy in policies}
    with closing(InProcess(engine_dir, configs)) as place:
        for num_clients, jobs in loops.items():
            short = [replace(job, max_tokens=8) for job in jobs]
            for policy in (*policies[first:], *policies[:first]):
                place.run(policy, short, num_clients)  # first calls of shapes are not measured, nor predicted
                pace.start()
                runs = place.serve_in_turns([policy], jobs, ClosedLoop(num_clients), lambda share: pace.take_turn())
                found[num_clients, policy] = summarise(*runs[policy]) | {"pace": pace.tokens_per_s()}
    return found


def predict(world: World, policy: str, jobs: list[Job], tokenizer: Tokenizer, num_clients: int) -> dict[str, float]:
    lengths = np.array([len(tokenizer.encode(job.prompt).ids) for job in jobs])
    outputs = np.array([job.max_tokens for job in jobs])
    trace = Trace(np.zeros(len(jobs)), lengths, outputs, "closed loop")
    config = EngineConfig.from_options(**options_of(policy))
    rows = []
    for seed in range(8):  # texts differ, so eight sets of them
        sim = build_sim_engine(world, config, seed=seed, max_output_tokens=int(outputs.max()))
        rows.append(run_closed_loop(sim, trace, num_clients).summary())
    return {name: statistics.fmean(row[name] for row in rows) for name in FIGURES}


def predict_all(
    engine_dir: Path, policies: list[str], loops: dict[int, list[Job]], pace: Pace, *, kind: str, is_quick: bool
) -> Figures:
    """Profiles the engine as the machine is now, and simulates every loop on it. The pace is that of the profile."""

    def on_progress(part: str, done: float) -> None:
        if part.endswith(WHOLE):  # these loops run on no split
            for _ in range(PACE_TURNS):
                pace.take_turn()

    pace.start()
    profile_engine(engine_dir, is_quick=is_quick, report=on_progress).save(engine_dir)
    world = profile_world(engine_dir, 16, kind=kind)
    tokenizer = Tokenizer.from_file(str(engine_dir / "tokenizer.json"))
    known = {"pace": pace.tokens_per_s()}
    return {
        (num_clients, policy): predict(world, policy, jobs, tokenizer, num_clients) | known
        for num_clients, jobs in loops.items()
        for policy in policies
    }


def merged(measured: list[Figures], predicted: list[Figures]) -> list[dict[str, Any]]:
    """A row per loop and policy: medians over the rounds, and each round's ratio of predicted to measured throughput,
    at the pace of the run (`ratios`) and as they are (`raw_ratios`)."""
    rows = []
    for num_clients, policy in measured[0]:
        real = [of[num_clients, policy] for of in measured]
        said = [of[num_clients, policy] for of in predicted]
        raw = [x["tokens_per_s"] / y["tokens_per_s"] for x, y in zip(said, real, strict=True)]
        ratios = [ratio * y["pace"] / x["pace"] for ratio, x, y in zip(raw, said, real, strict=True)]
        rows.append(
            {
                "num_clients": num_clients,
                "policy": policy,
                "measured": {name: statistics.median(row[name] for row in real) for name in FIGURES},
                "predicted": {name: statistics.median(row[name] for row in said) for name in FIGURES},
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "raw_ratios": raw,
                "paces": [[x["pace"], y["pace"]] for x, y in zip(said, real, strict=True)],
            }
        )
    return rows


COLUMNS = (
    Column("clients", "num_clients"),
    Column("policy", lambda row: f"`{row['policy']}`"),
    Column("measured tokens/s", lambda row: row["measured"]["tokens_per_s"], "{:.0f}"),
    Column("predicted", lambda row: row["predicted"]["tokens_per_s"], "{:.0f}"),
    Column("ratio", "ratio", "{:.2f}"),
    Column("lowest", lambda row: min(row["ratios"]), "{:.2f}"),
    Column("highest", lambda row: max(row["ratios"]), "{:.2f}"),
    Column("raw", lambda row: statistics.median(row["raw_ratios"]), "{:.2f}"),
    Column("accepted", lambda row: row["measured"]["mean_accepted"], "{:.2f}"),
    Column("predicted", lambda row: row["predicted"]["mean_accepted"], "{:.2f}"),
)


def tables(meta: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    errors = [abs(row["ratio"] - 1.0) for row in rows]
    return [
        f"The demo pair in process, closed loops of {NUM_JOBS} {meta['max_tokens']}-token completions at temperature "
        f"{meta['temperature']:g}, no prefix reuse; medians of {meta['rounds']} rounds, each of other texts. "
        "Predicted: the same loop in virtual time with the fitted acceptance process, on costs profiled right before "
        f"the round ({'quick' if meta['is_quick_profile'] else 'full'} profiles). Ratio: predicted over measured "
        "throughput, at the pace that the machine had in the run; two loads of 4 requests tell it, one plain, one with "
        "`fixed:4`, between the calls of the profile and in turns with every run. Raw: as they are.",
        "",
        *markdown_table(COLUMNS, rows),
        "",
        f"Within {GOAL:.0%}: {sum(error <= GOAL for error in errors)} of {len(rows)}; median error "
        f"{statistics.median(errors):.1%}, largest {max(errors):.1%}.",
    ]


def main() -> None:
    parser = make_parser(
        __doc__, "output", policies="none,fixed:2,fixed:4,survival", clients="1,4,16", max_tokens=100,
        name="simulation_check",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.8, choices=[0.0, 0.8], help="those that were fitted")
    parser.add_argument("--quick-profile", action="store_true", help="a minute and a half less a round, larger errors")
    args = parser.parse_args()
    policies = args.policies.split(",")
    demo = demo_engine_dir()
    meta = environment.describe(FIRST_SEED) | {
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "is_quick_profile": args.quick_profile,
    }
    prompts = [prompt for prompt in read_prompts(DEMO_PROMPTS) if len(prompt.text) <= MAX_PROMPT_CHARS]
    jobs = jobs_of(interleaved(prompts), NUM_JOBS * args.rounds, args.max_tokens, args.temperature, FIRST_SEED)
    all_num_clients = integers(args.clients)
    kind = "greedy" if args.temperature == 0.0 else "sampled"
    measured, predicted = list[Figures](), list[Figures]()
    with tempfile.TemporaryDirectory(prefix="faser-check-") as folder:
        engine_dir = Path(folder) / "demo"
        shutil.copytree(demo, engine_dir)
        with closing(Pace(engine_dir, jobs)) as pace:
            for index in range(args.rounds):
                loops = dict.fromkeys(all_num_clients, jobs[NUM_JOBS * index : NUM_JOBS * (index + 1)])
                predicted.append(predict_all(engine_dir, policies, loops, pace, kind=kind, is_quick=args.quick_profile))
                measured.append(measure(engine_dir, policies, loops, index % len(policies), pace))
                print(f"round {index + 1} of {args.rounds}", flush=True)
    rows = merged(measured, predicted)
    print(write_results(args.output / args.name, "The simulator against real runs", meta, tables(meta, rows), rows))


if __name__ == "__main__":
    main()
