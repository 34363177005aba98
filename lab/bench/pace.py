"""How fast the machine is from moment to moment, told by two small loads that take turns with whatever is measured.

A shared machine is up to twice as slow from one half minute to the next, and not for all work alike: what reads a
model's weights once per token suffers more than what verifies several rows. So one of the loads decodes plainly and
the other verifies drafts.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from faser_backend.config import EngineConfig
from faser_backend.core.request import Request
from faser_backend.pipeline.engine import Engine
from lab.bench.in_process import InProcess
from lab.bench.workload import Job

POLICIES = ("none", "fixed:4")
NUM_SEQUENCES = 4
TURN_S = 0.05  # of each load


class Pace:
    """Tokens per second of both loads, their geometric mean, over as many turns as were taken."""

    def __init__(self, engine_dir: Path, jobs: list[Job]) -> None:
        configs = {
            policy: EngineConfig.from_options(policy=policy, enable_prefix_reuse=False, max_num_seqs=NUM_SEQUENCES)
            for policy in POLICIES
        }
        self._place = InProcess(engine_dir, configs)
        self._loads = [_Load(self._place.engine(policy), self._requests(jobs)) for policy in POLICIES]
        for _ in range(10):  # first calls of shapes are not measured
            self.take_turn()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._place.close()

    def start(self) -> None:
        """What was measured before does not count."""
        for load in self._loads:
            load.num_tokens, load.seconds = 0, 0.0

    def take_turn(self) -> None:
        """Runs each load for a moment."""
        for load in self._loads:
            load.run(TURN_S)

    def tokens_per_s(self) -> float:
        """Since `start`, after one turn at least."""
        return math.prod(load.num_tokens / load.seconds for load in self._loads) ** (1 / len(self._loads))

    def _requests(self, jobs: list[Job]) -> Iterator[Request]:
        """The jobs over and over, under ever new names."""
        for index, job in enumerate(itertools.cycle(jobs)):
            yield replace(self._place.request(0, job), request_id=f"pace-{index}")


class _Load:
    """So many requests in flight, without an end."""

    def __init__(self, engine: Engine, requests: Iterator[Request]) -> None:
        self._engine = engine
        self._requests = requests
        self._num_running = 0
        self.num_tokens = 0
        self.seconds = 0.0

    def run(self, seconds: float) -> None:
        """Whole steps for at least so long."""
        start = now = time.perf_counter()
        while now - start < seconds:
            for _ in range(self._num_running, NUM_SEQUENCES):
                self._engine.submit(next(self._requests))
            outputs = self._engine.step()
            self._num_running = NUM_SEQUENCES - sum(output.is_final for output in outputs)
            self.num_tokens += sum(len(output.token_ids) for output in outputs)
            now = time.perf_counter()
        self.seconds += now - start
