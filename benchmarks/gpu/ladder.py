"""Contestants on one device, taking turns over the same requests: closed loops, and bursts in an open one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.gpu.lent_runtime import LentRuntime, overlap_figures
from benchmarks.gpu.worker import Context
from faser_backend.config import EngineConfig
from faser_backend.core.request import Request, SamplingParams
from faser_backend.device.runtime import ModelPair
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.knowledge import Knowledge
from faser_backend.serving.bench import accounting
from faser_backend.serving.bench.accounting import StepLog
from faser_backend.serving.bench.in_process import ClosedLoop, Feed, OpenLoop, serve_requests
from faser_backend.serving.bench.workload import Trace, merge_repeats, summarise, take_turns
from faser_backend.serving.compose import assemble, choose_policy
from faser_backend.simulation.trace import Trace as RequestTrace
from faser_backend.simulation.trace import with_rate_curve

REFERENCE, FIXED, WHOLE_POLICY = "none", "fixed:4", "faser"
PEAK_TO_TROUGH = 35.0
# Mean arrival rate over the rate at which the reference answers such requests when saturated. The peak is about three
# times the mean: bursts are beyond what plain decoding can do, troughs far below it.
BURSTY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy, and the fields of EngineConfig that make it an ablation."""

    policy: str
    note: str = ""
    options: dict[str, str] = field(default_factory=dict)
    is_rival: bool = False  # takes part in the bursty load

    @property
    def name(self) -> str:
        return f"{self.policy} ({self.note})" if self.note else self.policy


CONTESTANTS = (
    Contestant(REFERENCE, is_rival=True),
    Contestant("fixed:2"),
    Contestant(FIXED, is_rival=True),
    Contestant("goodput", is_rival=True),
    Contestant("survival", is_rival=True),
    Contestant(WHOLE_POLICY, is_rival=True),
    Contestant(WHOLE_POLICY, "no exit", {"early_exit": "off"}),
    Contestant(WHOLE_POLICY, "no pipeline", {"pipeline": "serial"}),
    Contestant(FIXED, "run-ahead", {"pipeline": "run_ahead"}),
    Contestant(FIXED, "ping-pong", {"pipeline": "ping_pong"}),
    Contestant(FIXED, "exits on", {"early_exit": "on"}),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a ladder. Lengths of the bursty load are log-normal around the same medians."""

    clients: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    waves: int
    repeats: int
    bursty_s: float
    temperature: float = 0.8


class Ladder:
    """Engines of all contestants on one lent runtime."""

    def __init__(
        self,
        context: Context,
        runtime: LentRuntime,
        models: ModelPair,
        max_num_seqs: int,
        num_prefill_tokens: int,
        load_knowledge: Callable[[], Knowledge],
    ) -> None:
        self._context = context
        self._runtime = runtime
        self._models = models
        self._load_knowledge = load_knowledge
        self._common: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_queue_size": 0,
            "max_prefill_tokens": num_prefill_tokens,
            "num_kv_blocks": max_num_seqs * -(-models.max_context // runtime.kv_block_size),
            "enable_prefix_reuse": False,
        }
        self._engines: dict[str, Engine] = {}
        self._logs: dict[str, StepLog] = {}
        self.missing: list[str] = []
        self._seed = context.seed

    def engine(self, contestant: Contestant) -> Engine:
        """Opened on first use. Raises ConfigError."""
        name = contestant.name
        if name not in self._engines:
            config = EngineConfig.from_options(policy=contestant.policy, **self._common, **contestant.options)
            policy = choose_policy(self._runtime, config, self._load_knowledge)
            self._engines[name] = assemble(self._runtime, self._models, policy, config)
            self._logs[name] = StepLog(self._engines[name])
        return self._engines[name]

    def log(self, contestant: Contestant) -> StepLog:
        return self._logs[contestant.name]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def requests(self, prompts: Sequence[int], outputs: Sequence[int], temperature: float) -> list[Request]:
        """Random prompts; request i draws with a seed of its own, the same for every contestant."""
        rng = np.random.default_rng([self._seed, 7])
        return [
            Request(
                str(index),
                rng.integers(0, self._models.vocab_size, prompt),
                output,
                SamplingParams(temperature=temperature, seed=self._seed * 100_003 + index),
            )
            for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]

    def closed(self, contestants: Sequence[Contestant], sizes: Sizes, num_clients: int) -> list[dict[str, Any]]:
        """Rows of one closed loop; every contestant warms up on the same jobs."""
        count = num_clients * sizes.waves
        jobs = self.requests([sizes.prompt_tokens] * count, [sizes.output_tokens] * count, sizes.temperature)
        load = {"load": f"{num_clients} clients", "num_clients": num_clients}
        return self._cell(contestants, load, jobs, ClosedLoop(num_clients), sizes.repeats, warm=jobs)

    def bursty(self, contestants: Sequence[Contestant], sizes: Sizes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Rows of the open loop, and its arrivals in words."""
        rng = np.random.default_rng([self._seed, 8])

        def lengths(median: int, count: int) -> np.ndarray:
            return np.clip(rng.lognormal(np.log(median), 0.6, count), 4, 4 * median).astype(np.int64)

        most = self._common["max_num_seqs"]
        trial = self.requests(
            lengths(sizes.prompt_tokens, 2 * most), lengths(sizes.output_tokens, 2 * most), sizes.temperature
        )
        reference = next(each for each in contestants if each.policy == REFERENCE)
        _, seconds = serve_requests(self.engine(reference), trial, ClosedLoop(most))
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
        load = {"load": "bursty", "num_clients": 0}
        return self._cell(contestants, load, jobs, OpenLoop(trace.arrivals_s.tolist()), 1, warm=trial), described

    def _cell(
        self,
        contestants: Sequence[Contestant],
        load: dict[str, Any],
        jobs: list[Request],
        feed: Feed,
        repeats: int,
        *,
        warm: list[Request],
    ) -> list[dict[str, Any]]:
        by_name = {contestant.name: contestant for contestant in contestants}
        warm_clients = load["num_clients"] or self._common["max_num_seqs"]
        for name, contestant in list(by_name.items()):
            try:
                serve_requests(self.engine(contestant), warm, ClosedLoop(warm_clients))
            except Exception as error:  # one contestant that cannot run takes no other with it
                del by_name[name]
                self.missing.append(f"{name}, {load['load']}: {type(error).__name__}: {error}"[:300])
                self._clear(name, warm)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in by_name}
        answers: dict[str, list[Trace]] = {}
        for name in take_turns(list(by_name), repeats) if by_name else ():
            if found[name] and not self._context.has_time(1.0):
                break
            answers[name], row = self._run(name, jobs, feed)
            found[name].append(row)
        return [
            {
                "policy": name,
                **load,
                "num_requests": len(jobs),
                **merge_repeats(rows),
                "num_different": _num_different(answers[name], answers.get(REFERENCE)),
            }
            for name, rows in found.items()
            if rows
        ]

    def _clear(self, name: str, jobs: list[Request]) -> None:
        """Ends what a contestant left behind: slots and blocks are everybody's."""
        engine = self._engines.get(name)
        if engine is not None:
            for job in jobs:
                engine.cancel(job.request_id)
            while engine.has_work:
                engine.step()

    def _run(self, name: str, jobs: list[Request], feed: Feed) -> tuple[list[Trace], dict[str, float]]:
        log = self._logs[name]
        log.start()
        for lanes in self._runtime.lanes:
            lanes.forget()
        traces, seconds = serve_requests(self._engines[name], jobs, feed)
        spans = [lanes.spans_us() for lanes in self._runtime.lanes]
        num_layers = self._models.target.spec.num_layers
        row = summarise(traces, seconds) | accounting.figures(log, num_layers)
        return traces, row | overlap_figures(np.concatenate([np.zeros((0, 2, 2)), *spans]))


def _num_different(found: list[Trace], reference: list[Trace] | None) -> int | None:
    if reference is None:
        return None
    return sum(a.digest != b.digest for a, b in zip(found, reference, strict=True))
