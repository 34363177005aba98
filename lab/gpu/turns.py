"""Contestants on one device, taking turns over the same requests in closed loops, and under bursts in an open one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.core.request import Request, SamplingParams
from faser_backend.device.runtime import ModelPair
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.speculation import Knowledge
from faser_backend.serving.compose import assemble_on, choose_policy
from faser_backend.serving.runtimes import AnyRuntime
from lab.bench.measure import PEAK_TO_TROUGH, Served, measure
from lab.contestants import ORACLE, REFERENCE, Contestant
from lab.drive import ClosedLoop, Feed, OpenLoop, OwnClock, serve_requests, take_turns
from lab.gpu.lent_runtime import LentRuntime, overlap_figures
from lab.gpu.worker import Context
from lab.simulation.acceptance import AcceptanceProcess
from lab.simulation.engine import OraclePolicy
from lab.steps import StepLog, figures
from lab.traces import make_lengths, with_rate_curve


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a ladder. clients: in the order of what matters most; the bursty load comes before the last of them. Lengths
    of the bursty load are log-normal around the same medians."""

    clients: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    waves: int
    repeats: int
    bursty_s: float
    temperature: float = 0.8


PREFILL_TOKENS = 2048  # of a step: on a GPU a chunk of 256 rows is hardly dearer than one of 32
BY_HOST = ("overlap_share", "step_overhead_share")  # laps of a host that merely queues say nothing of the device
# Mean arrival rate over the rate at which the reference answers such requests when saturated. The peak is about three
# times the mean: bursts are beyond what plain decoding can do, troughs far below it.
BURSTY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Setup:
    """What one ladder is run with."""

    models: ModelPair
    max_num_seqs: int
    process: AcceptanceProcess
    sizes: Sizes
    contestants: Sequence[Contestant]
    text: np.ndarray | None = None  # that prompts are cut from


class Ladder:
    """Engines of all contestants on one lent runtime, opened on first use, served one at a time: slots and blocks are
    everybody's. load_knowledge: for policies that weigh time, which are opened later than the others."""

    def __init__(
        self, context: Context, runtime: LentRuntime, setup: Setup, load_knowledge: Callable[[], Knowledge]
    ) -> None:
        self._context, self._runtime, self._setup = context, runtime, setup
        self._load_knowledge = load_knowledge
        num_blocks = setup.max_num_seqs * -(-setup.models.max_context // runtime.kv_block_size)
        self._common: dict[str, Any] = {
            "max_num_seqs": setup.max_num_seqs,
            "max_queue_size": 0,
            "max_prefill_tokens": PREFILL_TOKENS,
            "num_kv_blocks": num_blocks,
            "enable_prefix_reuse": False,
        }
        self._engines: dict[str, Engine] = {}
        self._clocks: dict[str, OwnClock] = {}
        self.logs: dict[str, StepLog] = {}
        self.missing: list[str] = []

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def closed(self, contestants: Sequence[Contestant], sizes: Sizes, num_clients: int) -> list[dict[str, Any]]:
        """Rows of one closed loop; every contestant warms up on the same jobs."""
        count = num_clients * sizes.waves
        jobs = self._requests([sizes.prompt_tokens] * count, [sizes.output_tokens] * count)
        load = {"load": f"{num_clients} clients", "num_clients": num_clients}
        return self._measure(contestants, jobs, ClosedLoop(num_clients), sizes.repeats, load=load, warm=jobs)

    def bursty(self, contestants: Sequence[Contestant]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Rows of the open loop, and its arrivals in words."""
        sizes, most = self._setup.sizes, self._setup.max_num_seqs
        rng, medians = np.random.default_rng([self._context.seed, 8]), (sizes.prompt_tokens, sizes.output_tokens)
        lengths = make_lengths(2 * most, rng, medians)
        trial = self._requests(lengths.num_prompt_tokens, lengths.num_output_tokens)
        reference = next(each for each in contestants if each.policy == REFERENCE)
        _, seconds = self._serve(reference, trial, ClosedLoop(most))
        rate = BURSTY_SHARE * len(trial) / seconds
        count = max(4, round(rate * sizes.bursty_s))
        trace = with_rate_curve(make_lengths(count, rng, medians), rate, PEAK_TO_TROUGH, self._context.seed)
        jobs = self._requests(trace.num_prompt_tokens, trace.num_output_tokens)
        described = {
            "arrivals": trace.description,
            "requests_per_s": rate,
            "share_of_saturation": BURSTY_SHARE,
            "median_prompt_tokens": sizes.prompt_tokens,
            "median_output_tokens": sizes.output_tokens,
        }
        load = {"load": "bursty", "num_clients": 0}
        return self._measure(
            contestants, jobs, OpenLoop(trace.arrivals_s.tolist()), 1, load=load, warm=trial
        ), described

    def _measure(
        self,
        contestants: Sequence[Contestant],
        jobs: list[Request],
        feed: Feed,
        repeats: int,
        *,
        load: dict[str, Any],
        warm: list[Request],
    ) -> list[dict[str, Any]]:
        clients = load["num_clients"] or self._setup.max_num_seqs
        ready = {each.name: each for each in contestants if self._warm_up(each, warm, clients, load["load"])}

        def serve(order: Sequence[str]) -> Iterable[tuple[str, Served]]:
            for name in order:
                if self._context.has_time(1.0):
                    self.logs[name].start()
                    for lanes in self._runtime.lanes:
                        lanes.forget()
                    yield name, self._serve(ready[name], jobs, feed)

        rows = measure(serve, list(ready), jobs, repeats, more=self._figures) if ready else []
        return [row | load | {"num_requests": len(jobs)} for row in rows]

    def _figures(self, name: str) -> dict[str, float]:
        found = figures(self.logs[name], self._setup.models.target.spec.num_layers)
        spans = [lanes.spans_us() for lanes in self._runtime.lanes]
        overlap = overlap_figures(np.concatenate([np.zeros((0, 2, 2)), *spans]))
        return {key: value for key, value in found.items() if key not in BY_HOST} | overlap

    def _engine(self, contestant: Contestant) -> Engine:
        """Raises ConfigError."""
        name, port = contestant.name, cast(AnyRuntime, self._runtime)
        if name not in self._engines:
            is_oracle = contestant.policy == ORACLE
            spec = "none" if is_oracle else contestant.policy
            config = EngineConfig.from_options(policy=spec, **self._common, **contestant.options)
            policy = self._oracle() if is_oracle else choose_policy(port, config, self._load_knowledge)
            self._clocks[name] = OwnClock()
            self._engines[name] = assemble_on(port, self._setup.models, policy, config, clock=self._clocks[name])
            self.logs[name] = StepLog(self._engines[name])
        return self._engines[name]

    def _oracle(self) -> OraclePolicy:
        """Raises ConfigError where outcomes are the models' own."""
        outcomes = self._runtime.outcomes
        if outcomes is None:
            raise ConfigError(f"policy = {ORACLE!r}: outcomes are known where they are planted alone")
        return OraclePolicy(outcomes, self._load_knowledge().costs)

    def _serve(self, contestant: Contestant, jobs: list[Request], feed: Feed) -> Served:
        name, engine = contestant.name, self._engine(contestant)
        run = serve_requests(engine, self._clocks[name], jobs, feed)
        return take_turns({name: run}, self._clocks, lambda share: None)[name]

    def _requests(self, prompts: Sequence[int] | np.ndarray, outputs: Sequence[int] | np.ndarray) -> list[Request]:
        """Request i draws with a seed of its own, the same for every contestant."""
        seed, rng = self._context.seed, np.random.default_rng([self._context.seed, 7])
        return [
            Request(
                str(index),
                self._prompt(int(num_prompt), rng),
                int(num_output),
                SamplingParams(temperature=self._setup.sizes.temperature, seed=seed * 100_003 + index),
            )
            for index, (num_prompt, num_output) in enumerate(zip(prompts, outputs, strict=True))
        ]

    def _prompt(self, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
        text = self._setup.text
        if text is None:
            return rng.integers(0, self._setup.models.vocab_size, num_tokens)
        start = int(rng.integers(0, text.size - num_tokens))
        return text[start : start + num_tokens]

    def _warm_up(self, contestant: Contestant, jobs: list[Request], num_clients: int, load: str) -> bool:
        """Captures and new shapes are not measured. False where the contestant cannot run, or time is over."""
        name = contestant.name
        if not self._context.has_time(1.0):
            self.missing.append(f"{name}, {load}: out of time")
            return False
        try:
            self._serve(contestant, jobs, ClosedLoop(num_clients))
        except Exception as error:  # one contestant that cannot run takes no other with it
            self.missing.append(f"{name}, {load}: {type(error).__name__}: {error}"[:300])
            if name in self._engines:
                _clear(self._engines[name], jobs)
            return False
        return True


def _clear(engine: Engine, jobs: list[Request]) -> None:
    """Ends what was left behind."""
    for job in jobs:
        engine.cancel(job.request_id)
    while engine.has_work:
        engine.step()
