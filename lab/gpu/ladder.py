"""Contestants on one device, taking turns over the same requests: closed loops, and bursts in an open one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.request import Request, SamplingParams
from faser_backend.device.runtime import ModelPair
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.speculation import Knowledge
from faser_backend.serving.compose import assemble_on, choose_policy
from faser_backend.serving.runtimes import AnyRuntime
from lab.bench import accounting
from lab.bench.accounting import StepLog
from lab.bench.in_process import ClosedLoop, Feed, OpenLoop, serve_requests
from lab.bench.turns import OwnClock, take_turns, turn_orders
from lab.bench.workload import Trace, merge_repeats, summarise
from lab.gpu.contestants import REFERENCE, Contestant, Sizes
from lab.gpu.lent_runtime import LentRuntime, overlap_figures
from lab.gpu.worker import Context
from lab.simulation.trace import Trace as RequestTrace
from lab.simulation.trace import with_rate_curve

PEAK_TO_TROUGH = 35.0
BY_HOST = ("overlap_share", "step_overhead_share")  # laps of a host that merely queues say nothing of the device
# Mean arrival rate over the rate at which the reference answers such requests when saturated. The peak is about three
# times the mean: bursts are beyond what plain decoding can do, troughs far below it.
BURSTY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Cell:
    """What contestants are asked under one load. num_clients: 0 in an open loop."""

    load: str
    num_clients: int
    jobs: list[Request]
    feed: Feed
    repeats: int
    warm: list[Request]


class Ladder:
    """Engines of all contestants on one lent runtime."""

    def __init__(
        self,
        context: Context,
        runtime: LentRuntime,
        models: ModelPair,
        *,
        max_num_seqs: int,
        num_prefill_tokens: int,
        load_knowledge: Callable[[], Knowledge],
        text: np.ndarray | None = None,
    ) -> None:
        """text [n]: token ids that prompts are cut from, None for random ones. load_knowledge: for policies that
        weigh time, which are opened later than the others."""
        self._context = context
        self.runtime = runtime
        self._port = cast(AnyRuntime, runtime)
        self._models = models
        self._load_knowledge = load_knowledge
        self._text = text
        self.max_num_seqs = max_num_seqs
        self._common: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_queue_size": 0,
            "max_prefill_tokens": num_prefill_tokens,
            "num_kv_blocks": max_num_seqs * -(-models.max_context // runtime.kv_block_size),
            "enable_prefix_reuse": False,
        }
        self._engines: dict[str, Engine] = {}
        self._clocks: dict[str, OwnClock] = {}
        self.logs: dict[str, StepLog] = {}
        self.missing: list[str] = []
        self._seed = context.seed

    def engine(self, contestant: Contestant) -> Engine:
        """Opened on first use. Raises ConfigError."""
        name = contestant.name
        if name not in self._engines:
            config = EngineConfig.from_options(policy=contestant.policy, **self._common, **contestant.options)
            policy = choose_policy(self._port, config, self._load_knowledge)
            self._clocks[name] = OwnClock()
            self._engines[name] = assemble_on(self._port, self._models, policy, config, clock=self._clocks[name])
            self.logs[name] = StepLog(self._engines[name])
        return self._engines[name]

    def _serve(self, contestant: Contestant, jobs: list[Request], feed: Feed) -> tuple[list[Trace], float]:
        """Traces and seconds. One at a time: slots and blocks are everybody's."""
        name, engine = contestant.name, self.engine(contestant)
        run = serve_requests(engine, self._clocks[name], jobs, feed)
        return take_turns({name: run}, self._clocks, lambda share: None)[name]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def requests(
        self, prompts: Sequence[int] | np.ndarray, outputs: Sequence[int] | np.ndarray, temperature: float
    ) -> list[Request]:
        """Request i draws with a seed of its own, the same for every contestant."""
        rng = np.random.default_rng([self._seed, 7])
        return [
            Request(
                str(index),
                self._prompt(int(prompt), rng),
                output,
                SamplingParams(temperature=temperature, seed=self._seed * 100_003 + index),
            )
            for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]

    def _prompt(self, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
        if self._text is None:
            return rng.integers(0, self._models.vocab_size, num_tokens)
        start = int(rng.integers(0, self._text.size - num_tokens))
        return self._text[start : start + num_tokens]

    def closed(self, contestants: Sequence[Contestant], sizes: Sizes, num_clients: int) -> list[dict[str, Any]]:
        """Rows of one closed loop; every contestant warms up on the same jobs."""
        count = num_clients * sizes.waves
        jobs = self.requests([sizes.prompt_tokens] * count, [sizes.output_tokens] * count, sizes.temperature)
        cell = Cell(f"{num_clients} clients", num_clients, jobs, ClosedLoop(num_clients), sizes.repeats, jobs)
        return self._measure(contestants, cell)

    def bursty(self, contestants: Sequence[Contestant], sizes: Sizes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Rows of the open loop, and its arrivals in words."""
        rng = np.random.default_rng([self._seed, 8])

        def lengths(median: int, count: int) -> np.ndarray:
            return np.clip(rng.lognormal(np.log(median), 0.6, count), 4, 4 * median).astype(np.int64)

        most = self.max_num_seqs
        trial = self.requests(
            lengths(sizes.prompt_tokens, 2 * most), lengths(sizes.output_tokens, 2 * most), sizes.temperature
        )
        reference = next(each for each in contestants if each.policy == REFERENCE)
        _, seconds = self._serve(reference, trial, ClosedLoop(most))
        rate = BURSTY_SHARE * len(trial) / seconds
        count = max(4, round(rate * sizes.bursty_s))
        prompts, outputs = lengths(sizes.prompt_tokens, count), lengths(sizes.output_tokens, count)
        trace = with_rate_curve(
            RequestTrace(np.zeros(count), prompts, outputs, "log-normal lengths"), rate, PEAK_TO_TROUGH, self._seed
        )
        jobs = self.requests(prompts, outputs, sizes.temperature)
        described = {
            "arrivals": trace.description,
            "requests_per_s": rate,
            "share_of_saturation": BURSTY_SHARE,
            "median_prompt_tokens": sizes.prompt_tokens,
            "median_output_tokens": sizes.output_tokens,
        }
        cell = Cell("bursty", 0, jobs, OpenLoop(trace.arrivals_s.tolist()), 1, trial)
        return self._measure(contestants, cell), described

    def _measure(self, contestants: Sequence[Contestant], cell: Cell) -> list[dict[str, Any]]:
        ready = {contestant.name: contestant for contestant in contestants if self._warm_up(contestant, cell)}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
        answers: dict[str, list[Trace]] = {}
        for order in turn_orders(list(ready), cell.repeats):
            for name in order:
                if self._context.has_time(1.0):
                    answers[name], row = self._run(ready[name], cell)
                    found[name].append(row)
        return [
            {
                "policy": name,
                "load": cell.load,
                "num_clients": cell.num_clients,
                "num_requests": len(cell.jobs),
                **merge_repeats(rows),
                "num_different": _num_different(answers[name], answers.get(REFERENCE)),
            }
            for name, rows in found.items()
            if rows
        ]

    def _warm_up(self, contestant: Contestant, cell: Cell) -> bool:
        """Captures and new shapes are not measured. False where the contestant cannot run, or time is over."""
        name = contestant.name
        if not self._context.has_time(1.0):
            self.missing.append(f"{name}, {cell.load}: out of time")
            return False
        try:
            self._serve(contestant, cell.warm, ClosedLoop(cell.num_clients or self.max_num_seqs))
        except Exception as error:  # one contestant that cannot run takes no other with it
            self.missing.append(f"{name}, {cell.load}: {type(error).__name__}: {error}"[:300])
            self._clear(name, cell.warm)
            return False
        return True

    def _clear(self, name: str, jobs: list[Request]) -> None:
        """Ends what a contestant left behind: slots and blocks are everybody's."""
        engine = self._engines.get(name)
        if engine is not None:
            for job in jobs:
                engine.cancel(job.request_id)
            while engine.has_work:
                engine.step()

    def _run(self, contestant: Contestant, cell: Cell) -> tuple[list[Trace], dict[str, float]]:
        log = self.logs[contestant.name]
        log.start()
        for lanes in self.runtime.lanes:
            lanes.forget()
        traces, seconds = self._serve(contestant, cell.jobs, cell.feed)
        spans = [lanes.spans_us() for lanes in self.runtime.lanes]
        num_layers = self._models.target.spec.num_layers
        row = summarise(traces, seconds) | accounting.figures(log, num_layers)
        for figure in BY_HOST:
            del row[figure]
        return traces, row | overlap_figures(np.concatenate([np.zeros((0, 2, 2)), *spans]))


def _num_different(found: list[Trace], reference: list[Trace] | None) -> int | None:
    if reference is None:
        return None
    return sum(a.digest != b.digest for a, b in zip(found, reference, strict=True))
