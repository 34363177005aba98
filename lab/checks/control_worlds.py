"""Compares two controllers in virtual worlds: both get the same texts, arrivals and disturbances.

A world fixes the true costs, the costs that a policy is told, the acceptance of each request, the arrivals, and how the
machine's speed drifts. Planning takes no virtual time; its real time is a column of the table. `--against TREE` takes
the other controller from another checkout. The worlds of `--held-out` are not for tuning.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.lab.answers import summarise
from faser_backend.lab.contestants import ORACLE
from faser_backend.lab.simulation.acceptance import AcceptancePath, AcceptanceProcess, Latent, demo_process
from faser_backend.lab.simulation.engine import SimEngine, World, build_sim_engine, run_open_loop
from faser_backend.lab.simulation.worlds import roofline_world
from faser_backend.lab.traces import Trace
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve, OverheadCost
from faser_backend.policy.registry import parse_policy
from faser_backend.policy.speculation import Knowledge
from faser_backend.serving.profile_store import ModelSize, default_cost_model

NUM_SEEDS, NUM_TRIAL_SEEDS, NUM_WORKERS = 8, 2, 2
STATIC = ("none", "fixed:1", "fixed:2", "fixed:3", "fixed:4")  # the best one is chosen on the trial seeds
YARDSTICKS = "yardsticks"
HERE = Path(__file__).resolve().parents[2]
WORLDS = Path(__file__).with_suffix(".toml")
RANDOM, HELD_OUT = range(12), range(1000, 1024)  # seeds of random worlds
OVERHEAD = OverheadCost(50.0, 2.0, 1.0, 10.0, 1.0, 50.0, 1.0, 40.0, trim_us=15.0, trim_sequence_us=3.0)
TINY = ModelSize((4,), 100_000, 100_000)
NO_PROFILE = default_cost_model(TINY, TINY, is_padded=False)

Row = dict[str, float]


def call(fixed_us: float, row_us: float, read_us: float | None = None) -> CallCost:
    """read_us: of each row beyond 64, which only calls that read prompts have."""
    slopes, start = np.array([row_us, row_us if read_us is None else read_us]), np.zeros(1)
    return CallCost(Curve.from_slopes(np.array([0.0, 64.0]), fixed_us, slopes), Curve.from_slopes(start, 0.0, start))


def costs(  # noqa: PLR0917
    draft_us: float,
    target_us: float,
    row_us: float,
    split: Sequence[float] | None = None,
    read_us: float | None = None,
    behind_exit: Sequence[float] = (),
) -> CostModel:
    """split: (draft_us, target_us) on the partition 1/1. read_us: of a prompt token, by the draft. behind_exit:
    (target_us, row_us) of a second segment."""
    behind = (call(*behind_exit),) if behind_exit else ()
    segments = {(TARGET, WHOLE): (call(target_us, row_us), *behind), (DRAFT, WHOLE): (call(draft_us, 1.0, read_us),)}
    if split is not None:
        segments |= {(TARGET, "1/1"): (call(split[1], row_us),), (DRAFT, "1/1"): (call(split[0], 1.0, read_us),)}
    return CostModel(segments, OVERHEAD, np.zeros(1), is_measured=True, is_padded=False)


class Texts:
    """A mixture of acceptance processes: request by request, in rotation.

    repeats: Whether texts repeat earlier passages, so that n-grams find their continuations.
    """

    def __init__(self, processes: Sequence[AcceptanceProcess], *, repeats: bool) -> None:
        self._processes, self._repeats = processes, repeats
        self.exit_aucs = processes[0].exit_aucs

    def path(self, key: tuple[int, ...], num_positions: int) -> AcceptancePath:
        path = self._processes[key[1] % len(self._processes)].path(key, num_positions)
        if not self._repeats:
            return path
        rng, tokens, start = np.random.default_rng([*key, 5]), path.tokens.tolist(), 40
        while start < num_positions:
            source, end = int(rng.integers(start)), min(start + int(rng.integers(10, 40)), num_positions)
            for index in range(start, end):
                tokens[index] = tokens[source + index - start]
            start = end + int(rng.integers(10, 60))
        drafted = np.where(path.drafted == path.tokens, tokens, path.drafted)
        return replace(path, tokens=np.array(tokens), drafted=drafted)


@cache
def process_at(acceptance: float | str) -> AcceptanceProcess:
    """Returns the demo pair's process, "greedy" or sampled at an acceptance."""
    return demo_process("greedy") if isinstance(acceptance, str) else demo_process("sampled").at_level(acceptance)


@dataclass(frozen=True)
class ControlWorld:
    """One row of the table. told: the costs that the policy is told, None = the truth."""

    name: str
    truth: CostModel
    told: CostModel | None = None
    acceptance: Sequence[float | str] = (0.7,)  # of each request, in rotation; "greedy": the demo pair's
    told_acceptance: float | None = None  # in the profile, None = the only acceptance, or 0.7
    num_requests: int = 8
    num_tokens: int = 300
    num_prompt: int = 4
    gap_ms: float = 0.0  # mean of exponential gaps between arrivals, 0 = all at once
    num_waves: int = 1  # groups of requests, wave_ms apart
    wave_ms: float = 0.0
    noise: float = 0.0  # standard deviation of the logarithm of the machine's slowness, correlated over 20 ms
    max_num_seqs: int = 256
    draft: str = "auto"  # option of the engine
    exit_auc: float = 0.5  # separability at the exit of costs with behind_exit
    has_flat_margins: bool = False  # margins that say nothing about acceptance
    repeats: bool = False  # texts repeat earlier passages
    has_oracle: bool = False  # the table shows the share of the oracle's latency gain over fixed:4
    machine: World | None = None  # a complete world, for truth and acceptance; lengths then vary between requests

    def world(self) -> World:
        """Returns the simulator's world."""
        return self.machine or self._with(
            self.truth, Texts([*map(self._process, self.acceptance)], repeats=self.repeats)
        )

    @cached_property
    def knowledge(self) -> Knowledge:
        """Returns the knowledge of a profile; without one the default costs alone."""
        if not (told := self.told or self.truth).is_measured:
            return Knowledge(told)
        alike = self.acceptance[0] if len(self.acceptance) == 1 else 0.7
        return (self.machine or self._with(told, self._process(self.told_acceptance or alike))).knowledge()

    def _process(self, acceptance: float | str) -> AcceptanceProcess:
        process = process_at(acceptance)
        if self.has_flat_margins:
            process = replace(process, chances=np.full_like(process.chances, acceptance), shifts=(0.0,))
        return process.with_exits((self.exit_auc,)) if len(self.truth.segments[TARGET, WHOLE]) == 2 else process

    @staticmethod
    def _with(costs: CostModel, process: Any) -> World:
        layers, exits = ((1, 5), ((0, 1),)) if len(costs.segments[TARGET, WHOLE]) == 2 else ((4,), ())
        return World("test", costs, process, layers, (1,), exits, 1 << 20, 8192, ())


def all_worlds() -> list[ControlWorld]:
    """Returns the default worlds: those of control_worlds.toml, the slowest ones first, and some random ones."""
    tables = tomllib.loads(WORLDS.read_text())
    known = {name: costs(*fields.pop("us"), **fields) for name, fields in tables["costs"].items()}
    known["none"] = NO_PROFILE
    machines = {name: roofline_world(*each, max_context=4096) for name, each in tables["machines"].items()}
    worlds = []
    for name, fields in tables["worlds"].items():
        if machine := machines.get(fields.pop("machine", "")):
            levels = fields.pop("levels", [])
            process = machine.process.with_levels(levels) if levels else machine.process
            fields |= {"truth": machine.costs, "machine": replace(machine, process=process)}
        else:
            fields |= {"truth": known[fields.pop("costs")], "told": known.get(fields.get("told"))}
        counts = fields.pop("num_requests", 8)
        for count in counts if isinstance(counts, list) else [counts]:
            worlds.append(ControlWorld(name.format(n=count), num_requests=count, **fields))
    return worlds + [random_world(seed) for seed in RANDOM]


def random_world(seed: int) -> ControlWorld:
    """Returns a world of which every parameter is drawn."""
    rng = np.random.default_rng([seed, 7])

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    target_us, size = between(500.0, 4000.0), int(rng.choice([1, 1, 2, 4, 8, 16, 32]))
    draft_us, row_us, read_us = (target_us * between(*ends) for ends in ((0.02, 1.0), (0.002, 0.3), (0.0005, 0.02)))
    split = (draft_us * rng.uniform(1.0, 2.0), target_us * rng.uniform(1.0, 1.6)) if rng.random() < 0.3 else None
    truth = costs(draft_us, target_us, row_us, split, read_us)
    wrong = costs(draft_us * between(0.2, 5.0), target_us, row_us * between(0.3, 3.0), split, read_us)
    told = [None, NO_PROFILE, wrong][rng.choice(3, p=[0.4, 0.3, 0.3])]
    levels = [round(float(each), 2) for each in rng.choice([0.05, *np.arange(0.2, 1.0, 0.1)], 2)]
    num_tokens, num_waves = int(between(60, 400)), int(rng.integers(1, 4))
    service_ms = num_tokens * (target_us + size * row_us) / 1e3
    return ControlWorld(
        f"random {seed}",
        truth,
        told,
        acceptance=levels if rng.random() < 0.4 else levels[:1],
        num_requests=size * num_waves,
        num_tokens=num_tokens,
        num_prompt=int(between(4, 1000)),
        gap_ms=service_ms / size * float(rng.uniform(0.5, 1.5)) if num_waves > 1 and rng.random() < 0.5 else 0.0,
        noise=float(rng.choice([0.0, 0.2])),
        max_num_seqs=size,
    )


def run(world: ControlWorld, spec: str, seed: int) -> Row:
    """Runs one policy, or ORACLE. Returns its figures; planning_us is real time per step."""
    rng = np.random.default_rng(seed)
    config = EngineConfig.from_options(
        policy="none", max_queue_size=0, max_num_seqs=world.max_num_seqs, draft=world.draft, max_prefill_tokens=2048
    )
    spread = rng.uniform(0.5, 1.5, (2, world.num_requests)) if world.machine else np.ones((2, world.num_requests))
    prompts = np.maximum(world.num_prompt * spread[0], 1).astype(np.int64)
    outputs = np.maximum(world.num_tokens * spread[1], 1).astype(np.int64)
    policy = None if spec == ORACLE else parse_policy(spec, lambda: world.knowledge)
    longest = int(outputs.max())
    spans_s: list[float] = []
    if policy is not None:  # before the engine takes its methods
        policy.decide, policy.observe = (_timed(each, spans_s) for each in (policy.decide, policy.observe))
    sim = build_sim_engine(world.world(), config, seed=seed, max_output_tokens=longest, policy=policy, name=spec)
    if world.noise:
        _disturb(sim, world.noise, np.random.default_rng([seed, 1]))
    gaps = rng.exponential(world.gap_ms, world.num_requests) if world.gap_ms else np.zeros(world.num_requests)
    waves = np.arange(world.num_requests) * world.num_waves // world.num_requests
    trace = Trace((gaps.cumsum() + world.wave_ms * waves) / 1e3, prompts, outputs, world.name)
    outcome = run_open_loop(sim, trace, [0.0 if each == "greedy" else 0.8 for each in world.acceptance])
    figures = summarise(outcome.answers, outcome.seconds)
    return {
        "tokens_per_s": figures["tokens_per_s"],
        "latency_ms": figures["e2e_ms_mean"],
        "num_drafted": sum(answer.num_drafted for answer in outcome.answers),
        "planning_us": 2e6 * sum(spans_s) / max(len(spans_s), 1),
    }


def _timed(method: Callable[..., Any], spans_s: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        start_s = time.thread_time()
        result = method(*arguments)
        spans_s.append(time.thread_time() - start_s)
        return result

    return timed


def _disturb(sim: SimEngine, noise: float, rng: np.random.Generator) -> None:
    """Makes the machine's slowness a function of virtual time, so that it is the same for every policy."""
    factors = np.exp(noise * Latent(0.0, math.exp(-0.25)).draw(0.0, rng.standard_normal(20_000)))
    clock, advance, start_ns = sim.clock, sim.clock.advance_us, sim.clock.now_ns()

    def advance_us(duration_us: float) -> None:
        index = (clock.now_ns() - start_ns) // 5_000_000
        advance(duration_us * factors[min(index, factors.size - 1)])

    clock.advance_us = advance_us  # type: ignore[method-assign]


# -- the table -------------------------------------------------------------------------------------


def yardsticks(world: ControlWorld, seeds: int) -> dict[str, list[Row]]:
    """Returns the rows of `none` and of the best static policy, and of `fixed:4` and the oracle if both are wanted."""
    found: dict[str, list[Row]] = {ORACLE: []}
    found |= {spec: [run(world, spec, seed) for seed in range(min(seeds, NUM_TRIAL_SEEDS))] for spec in STATIC}
    best = max(STATIC, key=lambda spec: _mean(found[spec], "tokens_per_s"))
    wanted = ["none", best, *(["fixed:4", ORACLE] if world.has_oracle else [])]
    for spec in dict.fromkeys(wanted):
        found[spec] += [run(world, spec, seed) for seed in range(len(found[spec]), seeds)]
    return {"best": found[best]} | {spec: found[spec] for spec in wanted}


def measure(tree: Path, spec: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a policy, or YARDSTICKS, with the code of a checkout in NUM_WORKERS processes. Returns rows by world."""
    command = [sys.executable, "-P", __file__, "--seeds", str(options.seeds), "--only", options.only]
    command += [*["--held-out"] * options.held_out, "--policy", spec, "--worker"]
    environment, pipe = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}, subprocess.PIPE
    commands = [[*command, str(index)] for index in range(NUM_WORKERS)]
    workers = [subprocess.Popen(each, env=environment, stdout=pipe, text=True) for each in commands]
    lines = "".join(worker.communicate()[0] for worker in workers).splitlines()
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"error: {spec} of {tree} failed")
    return dict(json.loads(line) for line in lines)


def _mean(rows: list[Row], name: str) -> float:
    return geometric_mean([row[name] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="faser", help="Judge this policy of this checkout.")
    parser.add_argument("--other", help="Compare with this policy, by default the same one.")
    parser.add_argument("--against", type=Path, default=HERE, metavar="TREE", help="Take the other from this checkout.")
    parser.add_argument("--only", default="", metavar="TEXT", help="Run the worlds whose names contain TEXT.")
    parser.add_argument("--held-out", action="store_true", help="Run the held-out worlds instead.")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options, spec = (found := parser.parse_args()), found.policy
    worlds = [random_world(seed) for seed in HELD_OUT] if options.held_out else all_worlds()
    if not (worlds := [world for world in worlds if options.only in world.name]):
        parser.error(f"--only {options.only}: no world's name contains this")
    if options.worker is not None:
        for world in worlds[options.worker :: NUM_WORKERS]:
            rows = [run(world, spec, seed) for seed in range(options.seeds)] if spec != YARDSTICKS else None
            print(json.dumps([world.name, rows or yardsticks(world, options.seeds)]), flush=True)
        return
    other_spec, other_tree = options.other or spec, options.against.resolve()
    if not (other_tree / "faser_backend").is_dir():
        parser.error(f"--against {options.against}: is no checkout")
    ours, static = (measure(HERE, each, options) for each in (spec, YARDSTICKS))  # a wrong --policy ends at once
    is_same = (other_spec, other_tree) == (spec, HERE)
    theirs = ours if is_same else measure(other_tree, other_spec, options)
    print(f"{'tokens/s over':32}   other    none  static  latency     draft tokens   us/step  oracle's latency gain")
    ratios = []
    for name in (world.name for world in worlds):
        own, other, yards = ours[name], theirs[name], static[name]
        against = (other, yards["none"], yards["best"])
        ratios.append([_mean(own, "tokens_per_s") / _mean(rows, "tokens_per_s") for rows in against])
        line = "".join(f"{ratio:8.3f}" for ratio in ratios[-1])
        line += f"{_mean(own, 'latency_ms') / _mean(other, 'latency_ms'):9.3f}"
        for figure, width in (("num_drafted", 17), ("planning_us", 10)):
            line += "/".join(f"{mean(row[figure] for row in rows):.0f}" for rows in (own, other)).rjust(width)
        if ORACLE in yards:
            start, end = (_mean(yards[spec], "latency_ms") for spec in ("fixed:4", ORACLE))
            line += "".join(f" {(start - _mean(rows, 'latency_ms')) / (start - end):.0%}" for rows in (own, other))
        print(f"{name:32}{line}")
    for words, total in (("geometric mean", geometric_mean), ("worst", min)):
        print(f"{words:32}" + "".join(f"{total(column):8.3f}" for column in zip(*ratios, strict=True)))


if __name__ == "__main__":
    main()
