"""Drafted chains as an engine verified them: what calibration is fitted to.

The real engine generates; its policy drafts a fixed length for everyone, and at every exit a pruner listens
without taking a row out. So margins, exit margins and acceptances are those of serving.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, Decision, ExitView, Pruner, TrimRule
from faser_backend.core.errors import FaserError
from faser_backend.core.record import StepRecord
from faser_backend.core.request import Request
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.lab.drive import write_all
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.early_exit import NUM_CANDIDATES

MakeEngine = Callable[[EngineConfig], Engine]  # on the runtime that is profiled; its caller closes the engine


MIN_STEPS = 8  # of a calibration, however little time there is
_BY_CHAIN = ("num_drafted", "num_accepted", "group", "is_sampled")


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """N chains of at most K draft tokens; entries past num_drafted have no meaning."""

    margins: np.ndarray  # [N, K] of the draft
    exit_margins: dict[int, np.ndarray]  # segment -> [N, K]
    num_drafted: np.ndarray  # [N]
    num_accepted: np.ndarray  # [N]
    group: np.ndarray  # [N] whose text: chains of a group are held out together
    is_sampled: np.ndarray  # bool [N]: not of a greedy request

    @property
    def is_drafted(self) -> np.ndarray:
        """bool [N, K]"""
        return np.arange(self.margins.shape[1]) < self.num_drafted[:, None]

    @property
    def is_accepted(self) -> np.ndarray:
        """bool [N, K]"""
        return np.arange(self.margins.shape[1]) < self.num_accepted[:, None]

    @property
    def is_tested(self) -> np.ndarray:
        """bool [N, K]: the accepted ones, and the one that ended the chain."""
        return np.arange(self.margins.shape[1]) < np.minimum(self.num_accepted + 1, self.num_drafted)[:, None]

    def take(self, index: np.ndarray) -> Chains:
        return Chains.joined([self], lambda arrays: arrays[0][index])

    @staticmethod
    def joined(parts: list[Chains], join: Callable[[list[np.ndarray]], np.ndarray] = np.concatenate) -> Chains:
        """All parts as one, array by array."""
        segments = parts[0].exit_margins
        return Chains(
            join([part.margins for part in parts]),
            {segment: join([part.exit_margins[segment] for part in parts]) for segment in segments},
            *(join([getattr(part, name) for part in parts]) for name in _BY_CHAIN),
        )


class ProbePolicy:
    """A fixed length for everyone, a pruner at the exits, trim rules in turn, a step each.

    For engines that are measured, not served.
    """

    is_drafting = True
    partitions = (WHOLE,)

    def __init__(
        self, num_draft_tokens: int, pruner: Pruner | None = None, trims: Sequence[TrimRule | None] = (None,)
    ) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._pruner = pruner
        self._trims = itertools.cycle(trims)

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        lengths = [self._num_draft_tokens] * len(sequences)
        return Decision(lengths, pruner=self._pruner, trim=next(self._trims))

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""


class Listener:
    """A pruner that keeps every row and remembers the step's exit margins; `observe` joins them with what came."""

    num_candidates = NUM_CANDIDATES

    def __init__(self, exits: frozenset[int], num_draft_tokens: int, group_of: dict[str, int]) -> None:
        self.exits = exits
        self._width = num_draft_tokens
        self._group_of = group_of
        self._heard: dict[int, np.ndarray] = {}
        self._records: list[Chains] = []

    def keep(self, view: ExitView) -> np.ndarray:
        self._heard[view.segment] = view.exit_margins
        return view.num_rows

    def observe(self, record: StepRecord) -> None:
        frontier, heard = record.frontier, self._heard
        self._heard = {}
        if frontier.margins is None or not frontier.num_drafted.any():
            return
        groups = [self._group_of[sequence.request.request_id] for sequence in record.plan.decodes]
        chains = Chains(
            self._padded(frontier.margins),
            {segment: self._padded(heard[segment]) for segment in self.exits},
            frontier.num_drafted,
            record.acceptance.num_accepted,
            np.array(groups, np.int64),
            np.array([not sequence.request.sampling.is_greedy for sequence in record.plan.decodes]),
        )
        self._records.append(chains.take(np.flatnonzero(chains.num_drafted)))

    @property
    def num_steps(self) -> int:
        """In which something was drafted."""
        return len(self._records)

    def chains(self) -> Chains:
        """All that were heard; raises FaserError where nothing was."""
        if not self._records:
            raise FaserError("calibration: nothing was drafted")
        return Chains.joined(self._records)

    def _padded(self, array: np.ndarray) -> np.ndarray:
        return np.pad(array.astype(np.float64), ((0, 0), (0, self._width - array.shape[1])))


def record_chains(
    make_engine: MakeEngine,
    exits: frozenset[int],
    requests: list[tuple[int, Request]],
    num_draft_tokens: int,
    progress: Callable[[float], None],
    *,
    latest_s: float = math.inf,
) -> Chains:
    """Runs (group, request) pairs to their ends, or until latest_s (of time.monotonic): all run side by side, so that
    every group is heard by then; MIN_STEPS are made in any case. Raises FaserError where one of them fails."""
    config = EngineConfig.from_options(policy=f"fixed:{num_draft_tokens}", max_queue_size=0)
    listener = Listener(exits, num_draft_tokens, {request.request_id: group for group, request in requests})
    engine = make_engine(config)

    def tell(done: float) -> None:
        progress(done)
        if time.monotonic() > latest_s and listener.num_steps >= MIN_STEPS:
            for _, request in requests:
                engine.stop(request.request_id)

    try:
        engine.step_runner.scheduler.policy = ProbePolicy(num_draft_tokens, listener if exits else None)
        engine.step_runner.observers.append(listener.observe)
        write_all(engine, [request for _, request in requests], tell)
    finally:
        engine.close()
    return listener.chains()
