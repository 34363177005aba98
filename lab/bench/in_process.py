"""Loads on engines in this process: no server, no text, no network.

A closed loop keeps a number of requests in flight; an open loop submits each one when it is due, whether or not the
engine keeps up. The loop itself is the engine's step thread. Engines that serve the same load take turns
(bench/turns.py); time is each one's own, and where nothing is running it goes on to the next request at once.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from faser_backend.config import EngineConfig
from faser_backend.core.errors import FaserError
from faser_backend.core.request import Request, RequestOutput, SamplingParams
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.serving.compose import build_engine
from lab.bench.turns import OwnClock, take_turns
from lab.bench.workload import Job, Trace

PLACE = "in process"


class Feed(Protocol):
    """When requests are submitted; seconds since the start of the run."""

    def num_due(self, now_s: float, num_ended: int) -> int:
        """Requests that should have been submitted by now."""
        ...

    def due_s(self, index: int, now_s: float) -> float:
        """From when on request `index` waits."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """num_clients requests in flight, each answer followed by the next request."""

    num_clients: int

    def num_due(self, now_s: float, num_ended: int) -> int:
        return self.num_clients + num_ended

    def due_s(self, index: int, now_s: float) -> float:
        return now_s


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests at given times, ascending; the wait until a step has ended counts as theirs."""

    arrivals_s: list[float]

    def num_due(self, now_s: float, num_ended: int) -> int:
        return bisect_right(self.arrivals_s, now_s)

    def due_s(self, index: int, now_s: float) -> float:
        return self.arrivals_s[index]


class InProcess:
    """One engine per name, all loaded, so that repeats can take turns."""

    def __init__(self, engine_dir: Path, configs: Mapping[str, EngineConfig]) -> None:
        self._tokenizer = Tokenizer.from_file(str(engine_dir / "tokenizer.json"))
        self._end_ids = EngineManifest.load(engine_dir).end_ids
        self._engine_dir = engine_dir
        self._engines: dict[str, Engine] = {}
        self._clocks: dict[str, OwnClock] = {}
        try:
            for name, config in configs.items():
                self.open(name, config)
        except BaseException:
            self.close()
            raise

    def open(self, name: str, config: EngineConfig) -> None:
        """One engine more. Raises ConfigError and stays as it was."""
        self._clocks[name] = OwnClock()
        self._engines[name] = build_engine(self._engine_dir, config, self._clocks[name])

    def engine(self, name: str) -> Engine:
        return self._engines[name]

    def run(self, policy: str, jobs: list[Job], num_clients: int) -> tuple[list[Trace], float]:
        """num_clients requests in flight until all jobs are answered. Returns traces and seconds."""
        return self.serve(policy, jobs, ClosedLoop(num_clients))

    def serve(self, name: str, jobs: list[Job], feed: Feed) -> tuple[list[Trace], float]:
        """Submits jobs in order as `feed` says. Returns a trace per job, and seconds. Raises FaserError."""
        return self.serve_in_turns([name], jobs, feed)[name]

    def serve_in_turns(
        self, names: Sequence[str], jobs: list[Job], feed: Feed, on_turn: Callable[[float], None] = lambda share: None
    ) -> dict[str, tuple[list[Trace], float]]:
        """`serve` for each of the engines, which all get the same jobs. on_turn: is told the share that is done."""
        runs = {
            name: serve_requests(
                self._engines[name], self._clocks[name], [self.request(i, job) for i, job in enumerate(jobs)], feed
            )
            for name in names
        }
        return take_turns(runs, self._clocks, on_turn)

    def request(self, index: int, job: Job) -> Request:
        """The job under this number."""
        return Request(
            request_id=str(index),
            prompt_ids=np.array(job.prompt_ids or self._tokenizer.encode(job.prompt).ids, dtype=np.int64),
            max_tokens=job.max_tokens,
            sampling=SamplingParams(temperature=job.temperature, seed=job.seed),
            end_ids=self._end_ids if job.is_chat else (),
        )

    def overhead(self, policy: str) -> dict[str, float]:
        """Milliseconds per phase of a step since the start, largest first."""
        metrics = self._engines[policy].metrics()
        phases = sorted(metrics.phase_times_ns.items(), key=lambda item: -item[1])
        return {phase: ns / 1e6 / max(metrics.num_steps, 1) for phase, ns in phases}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def serve_requests(
    engine: Engine, clock: OwnClock, requests: Sequence[Request], feed: Feed
) -> Generator[float, None, tuple[list[Trace], float]]:
    """Submits requests, whose ids are their places, as `feed` says; yields after each step the share that is answered.

    Returns a trace per request, and seconds, both by the clock. Raises FaserError.
    """
    traces = [Trace(0.0, [], 0, 0, 0, "") for _ in requests]
    tokens: list[list[int]] = [[] for _ in requests]
    num_sent = num_ended = 0
    start = clock.now_s()
    while num_ended < len(requests):
        now = clock.now_s() - start
        for index in range(num_sent, min(feed.num_due(now, num_ended), len(requests))):
            traces[index].start_s = start + feed.due_s(index, clock.now_s() - start)
            engine.submit(requests[index])
            num_sent += 1
        if not engine.has_work:
            clock.skip(feed.due_s(num_sent, now) - now)
            continue
        outputs = engine.step()
        now = clock.now_s()
        for output in outputs:
            index = int(output.request_id)
            tokens[index] += output.token_ids
            _take(traces[index], output, now)
            num_ended += output.is_final
        yield num_ended / len(requests)
    seconds = clock.now_s() - start
    for request, trace, ids in zip(requests, traces, tokens, strict=True):
        trace.num_tokens = len(ids)
        if request.end_ids:
            trace.cut_accepted()
        trace.digest = hashlib.sha256(np.array(ids, dtype=np.int64).tobytes()).hexdigest()
    return traces, seconds


def _take(trace: Trace, output: RequestOutput, now_s: float) -> None:
    if output.error is not None:
        raise FaserError(f"request {output.request_id} failed: {output.error}")
    trace.response_s.append(now_s)
    if output.is_final:
        assert output.stats is not None
        trace.num_drafted = output.stats.num_drafted
        trace.num_accepted = output.stats.num_accepted
