"""Drives engines in this process, real or simulated, without a server, text or network.

A closed loop keeps a number of requests in flight. An open loop submits each request when it is due, even if the engine
falls behind. The loop is the engine's step thread; while the engine is idle, its clock skips to the next request.
Engines with the same load run alternately, each by its own clock, because a shared machine's speed varies by a tenth
within seconds. One after the other, six equal engines differ by 6.1 % (standard deviation); alternately, by 0.9 %.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import FaserError
from faser_backend.core.request import EngineOutput, Request, Sampling
from faser_backend.lab.answers import Answer, Job
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.serving.compose import build_engine
from faser_backend.text.tokenizer import load_tokenizer

TURN_S = 0.1  # a few of the longest steps; caches are cold for every engine when it resumes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A schedule that keeps num_clients requests in flight."""

    num_clients: int

    def num_due(self, now_s: float, num_ended: int) -> int:
        """Returns the number of requests that are due; times are in seconds since the start of the run."""
        return self.num_clients + num_ended

    def due_s(self, index: int, now_s: float) -> float:
        """Returns the time at which request `index` is due."""
        return now_s


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A schedule of given, ascending times. A request's wait for the end of a step counts as its latency."""

    arrivals_s: list[float]

    def num_due(self, now_s: float, num_ended: int) -> int:
        return bisect_right(self.arrivals_s, now_s)

    def due_s(self, index: int, now_s: float) -> float:
        return self.arrivals_s[index]


Feed = ClosedLoop | OpenLoop


class RunClock(Protocol):
    """The clock by which a run measures."""

    def now_s(self) -> float: ...

    def skip(self, seconds: float) -> None:
        """Advances the clock at once, instead of waiting. A negative time is ignored."""
        ...


class OwnClock:
    """A clock in nanoseconds that stops while other engines run."""

    def __init__(self) -> None:
        self._lag_ns = 0  # lag behind the machine's clock
        self._stopped_ns: int | None = None  # the machine's time at the stop; None while this clock runs

    def now_ns(self) -> int:
        return (time.perf_counter_ns() if self._stopped_ns is None else self._stopped_ns) - self._lag_ns

    def now_s(self) -> float:
        return self.now_ns() / 1e9

    def stop(self) -> None:
        """Stops the clock, which must be running."""
        self._stopped_ns = time.perf_counter_ns()

    def go_on(self) -> None:
        """Resumes the clock, which must be stopped."""
        assert self._stopped_ns is not None
        self._lag_ns += time.perf_counter_ns() - self._stopped_ns
        self._stopped_ns = None

    def skip(self, seconds: float) -> None:
        """Advances the clock at once, instead of waiting. A negative time is ignored."""
        self._lag_ns -= max(round(seconds * 1e9), 0)


def take_turns(
    runs: Mapping[str, Generator[float, None, T]],
    clocks: Mapping[str, OwnClock],
    on_turn: Callable[[float], None],
    turn_s: float = TURN_S,
) -> dict[str, T]:
    """Returns the result of each run, in the order of `runs`. A run yields, after each step, the share that is done.

    clocks: the runs' clocks. on_turn: called with the mean share after every turn.
    """
    results: dict[str, T] = {}
    done = dict.fromkeys(runs, 0.0)
    for name in runs:
        clocks[name].stop()
    try:
        while len(results) < len(runs):
            for name in [name for name in runs if name not in results]:
                clock = clocks[name]
                clock.go_on()
                try:
                    until_s = clock.now_s() + turn_s
                    while clock.now_s() < until_s:
                        done[name] = next(runs[name])
                except StopIteration as end:
                    results[name], done[name] = end.value, 1.0
                finally:
                    clock.stop()
                on_turn(sum(done.values()) / len(done))
    finally:
        for name in runs:
            clocks[name].go_on()
    return {name: results[name] for name in runs}


def turn_orders(names: Sequence[str], repeats: int) -> Iterator[list[str]]:
    """Yields the order of each repeat. It rotates, so that no engine always follows the same neighbour."""
    for repeat in range(repeats):
        first = repeat % max(len(names), 1)
        yield [*names[first:], *names[:first]]


class InProcess:
    """Several loaded engines, by name, which run alternately."""

    def __init__(self, engine_dir: Path) -> None:
        self._tokenizer = load_tokenizer(engine_dir / "tokenizer.json")
        self._end_ids = EngineManifest.load(engine_dir).end_ids
        self._engine_dir = engine_dir
        self._engines: dict[str, Engine] = {}
        self._clocks: dict[str, OwnClock] = {}

    def open(self, name: str, config: EngineConfig, engine_dir: Path | None = None) -> None:
        """Opens an engine, optionally of another directory of the same model. Raises ConfigError."""
        self._clocks[name] = OwnClock()
        self._engines[name] = build_engine(engine_dir or self._engine_dir, config, self._clocks[name])

    def close_one(self, name: str) -> None:
        """Closes one engine and releases its memory."""
        self._engines.pop(name).close()

    def engine(self, name: str) -> Engine:
        return self._engines[name]

    def run(self, name: str, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        """Keeps num_clients requests in flight until all jobs are answered. Returns answers and seconds."""
        return self.serve_in_turns([name], jobs, ClosedLoop(num_clients))[name]

    def serve_in_turns(
        self, names: Sequence[str], jobs: list[Job], feed: Feed, on_turn: Callable[[float], None] = lambda share: None
    ) -> dict[str, tuple[list[Answer], float]]:
        """Submits the same jobs, in order on the schedule `feed`, to engines that take turns. Raises FaserError.

        Returns an answer per job, and seconds, by engine. on_turn: called with the share done.
        """
        runs = {
            name: serve_requests(
                self._engines[name], self._clocks[name], [self.request(i, job) for i, job in enumerate(jobs)], feed
            )
            for name in names
        }
        return take_turns(runs, self._clocks, on_turn)

    def request(self, index: int, job: Job) -> Request:
        """Returns the engine's request for a job."""
        return Request(
            request_id=str(index),
            prompt_ids=np.array(job.prompt_ids or self._tokenizer.encode(job.prompt).ids, dtype=np.int64),
            max_tokens=job.max_tokens,
            sampling=Sampling(temperature=job.temperature, seed=job.seed),
            end_ids=self._end_ids if job.is_chat else (),
        )

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def serve_requests(
    engine: Engine, clock: RunClock, requests: Sequence[Request], feed: Feed
) -> Generator[float, None, tuple[list[Answer], float]]:
    """Submits requests, whose ids are their indices, on the schedule `feed`. Yields after each step the share answered.

    Returns an answer per request, and seconds, both by the clock. Raises FaserError.
    """
    answers = [Answer(0.0, [], 0, 0, 0, "") for _ in requests]
    num_sent = num_ended = 0
    start = clock.now_s()
    while num_ended < len(requests):
        now = clock.now_s() - start
        for index in range(num_sent, min(feed.num_due(now, num_ended), len(requests))):
            answers[index].start_s = start + feed.due_s(index, clock.now_s() - start)
            engine.submit(requests[index])
            num_sent += 1
        if not engine.has_work:
            clock.skip(feed.due_s(num_sent, now) - now)
            continue
        outputs = engine.step()
        now = clock.now_s()
        for output in outputs:
            _take(answers[int(output.request_id)], output, now)
            num_ended += output.is_final
        yield num_ended / len(requests)
    seconds = clock.now_s() - start
    for answer in answers:
        answer.num_tokens = len(answer.token_ids)
        answer.digest = hashlib.sha256(np.array(answer.token_ids, dtype=np.int64).tobytes()).hexdigest()
    return answers, seconds


def _take(answer: Answer, output: EngineOutput, now_s: float) -> None:
    if output.error is not None:
        raise FaserError(f"request {output.request_id} failed: {output.error}")
    answer.response_s.append(now_s)
    answer.token_ids += output.token_ids
    if output.is_final:
        assert output.stats is not None
        answer.num_drafted = output.stats.num_drafted
        answer.num_accepted, answer.num_steps = output.stats.num_accepted, output.stats.num_steps


def finished(run: Generator[float, None, T]) -> T:
    """Runs to the end without alternating, and returns the result."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


def write_all(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Submits all requests at once. Returns their tokens by id. Raises FaserError if one fails."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise FaserError(f"request {output.request_id} failed: {output.error}")
            tokens[output.request_id] += output.token_ids
    return tokens
