"""Worlds in virtual time on which two controllers are compared: the same texts, arrivals and disturbances for both.

A world fixes the real costs, what a policy is told about them, the spread of requests' acceptance, their arrivals, and
how the machine's speed drifts. `python -m lab.checks.control_worlds --policies faser --json FILE` runs all worlds;
`--compare OLD NEW` prints the table by which a change of the controller is judged.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.request import Request, Sampling
from faser_backend.lab.answers import summarise
from faser_backend.lab.drive import OpenLoop, finished, serve_requests
from faser_backend.lab.simulation.acceptance import AcceptancePath, AcceptanceProcess, demo_process
from faser_backend.lab.simulation.engine import SimEngine, World, build_sim_engine
from faser_backend.lab.simulation.worlds import roofline_world
from faser_backend.policy.cost_model import (
    DRAFT,
    TARGET,
    CallCost,
    CostModel,
    Curve,
    ModelSize,
    OverheadCost,
    default_cost_model,
)
from faser_backend.policy.registry import parse_policy
from faser_backend.policy.speculation import Knowledge

NUM_SEEDS = 8
TRIM_FREE = OverheadCost(50.0, 2.0, 1.0, 10.0, 1.0, 50.0, 1.0, 40.0)
OVERHEAD = replace(TRIM_FREE, trim_us=15.0, trim_sequence_us=3.0)
TINY = ModelSize((4,), 100_000, 100_000, 64)  # told nothing: guesses for an engine that was never profiled


def call(fixed_us: float, row_us: float) -> CallCost:
    start = np.zeros(1)
    return CallCost(Curve.from_slopes(start, fixed_us, np.array([row_us])), Curve.from_slopes(start, 0.0, np.zeros(1)))


def costs(draft_us: float, target_us: float, row_us: float, split: tuple[float, float] | None = None) -> CostModel:
    """split: (draft_us, target_us) on the partition 1/1, where there is one."""
    segments = {(TARGET, WHOLE): (call(target_us, row_us),), (DRAFT, WHOLE): (call(draft_us, 1.0),)}
    if split is not None:
        segments |= {(TARGET, "1/1"): (call(split[1], row_us),), (DRAFT, "1/1"): (call(split[0], 1.0),)}
    return CostModel(segments, OVERHEAD, np.zeros(1), is_measured=True, is_padded=False)


class Mixture:
    """Stands for an AcceptanceProcess whose requests follow different ones. choose: from the request's index."""

    exit_aucs: tuple[float, ...] = ()

    def __init__(self, processes: list[AcceptanceProcess], choose: Callable[[int], int]) -> None:
        self._processes = processes
        self._choose = choose

    def path(self, key: tuple[int, ...], num_positions: int) -> AcceptancePath:
        return self._processes[self._choose(key[1])].path(key, num_positions)


@dataclass(frozen=True)
class ControlWorld:
    """One row of the table. told: what policies believe of the costs, None = the truth."""

    name: str
    truth: CostModel
    told: CostModel | None = None
    process: Any = field(default_factory=lambda: demo_process("sampled").at_level(0.7))
    told_process: AcceptanceProcess | None = None  # None = the process, where it is one
    num_requests: int = 8
    num_tokens: int = 300
    num_prompt: int = 4
    gap_ms: float = 0.0  # mean of exponential gaps between arrivals, 0 = all at once
    waves: int = 1  # groups in which requests come, wave_ms apart
    wave_ms: float = 0.0
    noise: float = 0.0  # standard deviation of the log of the machine's slowness, which wanders in 20 ms
    is_sampled: Callable[[int], bool] = lambda index: True
    base: World | None = None  # a whole roofline world
    max_num_seqs: int = 256


def _levels(*levels: float) -> list[AcceptanceProcess]:
    return [demo_process("sampled").at_level(level) for level in levels]


def all_worlds() -> list[ControlWorld]:
    """Returns every row of the table."""
    memory, compute, tie = costs(100.0, 2000.0, 5.0), costs(2000.0, 100.0, 400.0), costs(300.0, 1000.0, 150.0)
    cheap_rows, slow_draft = costs(500.0, 1000.0, 100.0), costs(900.0, 1000.0, 40.0)
    mixed = Mixture(_levels(0.9, 0.6), lambda index: index % 2)
    worlds = [ControlWorld(f"memory bound, {n}", memory, num_requests=n) for n in (1, 8, 32)]
    worlds += [ControlWorld(f"compute bound, {n}", compute, num_requests=n) for n in (1, 8, 32)]
    worlds += [
        ControlWorld(f"draft 18x slower than told, {n}", slow_draft, costs(50.0, 1000.0, 40.0), num_requests=n)
        for n in (1, 8)
    ]
    worlds += [
        ControlWorld(f"draft 18x faster than told, {n}", costs(50.0, 1000.0, 40.0), slow_draft, num_requests=n)
        for n in (1, 8)
    ]
    worlds += [
        ControlWorld("rows 10x dearer than told, 8", costs(100.0, 1000.0, 100.0), costs(100.0, 1000.0, 10.0)),
        ControlWorld("nearly a tie, 4", tie, num_requests=4),
        ControlWorld("plain is best, 16", costs(100.0, 100.0, 100.0), num_requests=16, num_tokens=1200),
        ControlWorld("one easy request", cheap_rows, process=_levels(0.9)[0], num_requests=1),
        ControlWorld("free split, 8", costs(375.0, 1000.0, 25.0, (375.0, 1000.0)), process=_levels(0.9)[0]),
        ControlWorld("slow split, 8", costs(100.0, 2000.0, 5.0, (200.0, 8000.0))),
        ControlWorld("cold start, memory bound, 8", memory, default_cost_model(TINY, TINY, is_padded=False)),
        ControlWorld("cold start, compute bound, 8", compute, default_cost_model(TINY, TINY, is_padded=False)),
        ControlWorld("one after the other", memory, num_requests=24, gap_ms=300.0, num_tokens=120),
        ControlWorld("growing and shrinking", costs(300.0, 2000.0, 60.0), num_requests=64, waves=4, wave_ms=1500.0),
        ControlWorld("bursts", costs(400.0, 1500.0, 120.0), num_requests=64, gap_ms=40.0, num_tokens=150),
        *(
            ControlWorld(
                f"mixed 0.9/0.6, {n}", costs(200.0, 2000.0, 60.0), process=mixed, num_requests=4 * n, max_num_seqs=n
            )
            for n in (8, 32)
        ),
        ControlWorld(
            "texts become harder, 1",
            costs(300.0, 1000.0, 60.0),
            process=Mixture(_levels(0.95, 0.5), lambda index: int(index >= 8)),
            told_process=_levels(0.95)[0],
            num_requests=16,
            gap_ms=400.0,
        ),
        ControlWorld(
            "greedy and sampled in turn",
            costs(300.0, 1500.0, 60.0),
            process=Mixture([demo_process("greedy"), _levels(0.5)[0]], lambda index: index // 8 % 2),
            num_requests=64,
            gap_ms=60.0,
            is_sampled=lambda index: index // 8 % 2 == 1,
        ),
        ControlWorld("long prompts, short answers", memory, num_requests=24, num_prompt=1500, num_tokens=40, gap_ms=60),
        ControlWorld("noise, memory bound, 4", memory, num_requests=4, noise=0.3, num_tokens=600),
        ControlWorld("noise, nearly a tie, 4", tie, num_requests=4, noise=0.3, num_tokens=600),
        ControlWorld("noise, plain is best, 16", costs(100.0, 100.0, 100.0), num_requests=16, noise=0.3),
    ]
    for pair in ("qwen3-32b/0.6b", "llama3.3-70b/3.2-1b"):
        base = roofline_world("h100" if pair[0] == "q" else "h100x2", pair, max_context=4096)
        for name, rate, prompt, tokens in (("2/s", 2.0, 1014, 247), ("26/s", 26.0, 1014, 247), ("short", 8.0, 100, 60)):
            worlds.append(
                ControlWorld(
                    f"{pair.split('/')[0]} {name}",
                    base.costs,
                    process=base.process,
                    num_requests=120,
                    num_prompt=prompt,
                    num_tokens=tokens,
                    gap_ms=1e3 / rate,
                    base=base,
                )
            )
    return worlds


def run(world: ControlWorld, spec: str, seed: int) -> dict[str, float]:
    """Returns tokens per virtual second and mean latency in milliseconds of one policy."""
    rng = np.random.default_rng(seed)
    knowledge = _knowledge(world)
    policy = parse_policy(spec, lambda: knowledge)
    told = world.base or World("test", world.truth, world.process, (4,), (1,), (), 1 << 20, 8192, ())
    config = EngineConfig.from_options(policy="none", max_queue_size=0, max_num_seqs=world.max_num_seqs)
    # Lengths vary as those of real requests do: by half about their mean.
    spread = rng.uniform(0.5, 1.5, (2, world.num_requests)) if world.base else np.ones((2, world.num_requests))
    prompts = np.maximum(world.num_prompt * spread[0], 1).astype(np.int64)
    outputs = np.maximum(world.num_tokens * spread[1], 1).astype(np.int64)
    sim = build_sim_engine(told, config, seed=seed, max_output_tokens=int(outputs.max()), policy=policy)
    if world.noise:
        _disturb(sim, world.noise, np.random.default_rng([seed, 1]))
    gaps = rng.exponential(world.gap_ms, world.num_requests) if world.gap_ms else np.zeros(world.num_requests)
    waves = np.arange(world.num_requests) * world.waves // world.num_requests
    requests = [
        Request(
            str(index),
            np.zeros(int(prompts[index]), np.int64),
            int(outputs[index]),
            Sampling(seed=index, temperature=0.8 if world.is_sampled(index) else 0.0),
        )
        for index in range(world.num_requests)
    ]
    feed = OpenLoop(((gaps.cumsum() + world.wave_ms * waves) / 1e3).tolist())
    answers, seconds = finished(serve_requests(sim.engine, sim.clock, requests, feed))
    figures = summarise(answers, seconds)
    return {"tokens_per_s": figures["tokens_per_s"], "latency_ms": figures["e2e_ms_mean"]}


def _knowledge(world: ControlWorld) -> Knowledge:
    told = world.told or world.truth
    if not told.is_measured:
        return Knowledge(told)
    if world.base is not None:
        return world.base.knowledge()
    process = world.told_process or world.process
    if isinstance(process, Mixture):
        process = demo_process("sampled").at_level(0.7)
    return World("test", told, process, (4,), (1,), (), 1 << 20, 8192, ()).knowledge()


def _disturb(sim: SimEngine, noise: float, rng: np.random.Generator) -> None:
    """The machine's slowness is a function of virtual time, so that it is the same for every policy."""
    keep = math.exp(-0.25)
    path = np.zeros(20_000)
    for index, step in enumerate(rng.standard_normal(path.size - 1) * noise * math.sqrt(1.0 - keep**2), 1):
        path[index] = keep * path[index - 1] + step
    factors = np.exp(path)
    clock, advance, start_ns = sim.clock, sim.clock.advance_us, sim.clock.now_ns()

    def advance_us(duration_us: float) -> None:
        place = (clock.now_ns() - start_ns) // 5_000_000
        advance(duration_us * factors[min(place, factors.size - 1)])

    clock.advance_us = advance_us  # type: ignore[method-assign]


def compare(old: dict[str, Any], new: dict[str, Any], old_name: str, new_name: str) -> str:
    """A table of ratios above 1 where the new controller is better: tokens per time, and old over new latency."""
    lines = ["| world | tokens/time | latency |", "|---|---|---|"]
    speeds, latencies = [], []
    for name, rows in old.items():
        pairs = list(zip(rows[old_name], new[name][new_name], strict=True))
        speed = geometric_mean([b["tokens_per_s"] / a["tokens_per_s"] for a, b in pairs])
        latency = geometric_mean([a["latency_ms"] / b["latency_ms"] for a, b in pairs])
        speeds.append(speed)
        latencies.append(latency)
        lines.append(f"| {name} | {speed:.3f} | {latency:.3f} |")
    lines.append(f"| geometric mean | {geometric_mean(speeds):.3f} | {geometric_mean(latencies):.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default="faser", help="comma-separated")
    parser.add_argument("--worlds", default="", help="only those whose names hold this")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", nargs=4, metavar=("OLD", "POLICY", "NEW", "POLICY"))
    options = parser.parse_args()
    if options.compare:
        old, old_name, new, new_name = options.compare
        print(compare(json.loads(Path(old).read_text()), json.loads(Path(new).read_text()), old_name, new_name))
        return
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for world in all_worlds():
        if options.worlds not in world.name:
            continue
        for spec in options.policies.split(","):
            rows = [run(world, spec, seed) for seed in range(options.seeds)]
            results.setdefault(world.name, {})[spec] = rows
            print(f"{world.name:32} {spec:10} {np.mean([row['tokens_per_s'] for row in rows]):9.1f} tok/s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
