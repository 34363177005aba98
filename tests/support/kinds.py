"""Batches of greedy and sampled requests, and steps of them, by letters: "gs" is one of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from faser_backend.core.decision import Decision, PipelineMode, TrimRule
from faser_backend.core.frontier import Acceptance, Frontier, Verification
from faser_backend.core.plan import InFlight, StepPlan
from faser_backend.core.record import StepRecord
from faser_backend.core.request import Sampling
from faser_backend.core.sequence import Sequence
from tests.support.harness import request

K = 5
SAMPLING = {"g": Sampling(), "s": Sampling(temperature=0.8)}
RATES = {"g": 0.9, "s": 0.4}  # of acceptance


def batch(kinds: str, num_tokens: int = 300) -> list[Sequence]:
    """A sequence for each letter: of a greedy request or of a sampled one."""
    requests = [request(str(b), [1, 2, 3], num_tokens, sampling=SAMPLING[kind]) for b, kind in enumerate(kinds)]
    return [Sequence.from_request(each, 0) for each in requests]


def record(
    kinds: str,
    num_accepted: list[int],
    *,
    num_drafted: list[int] | None = None,
    num_kept: list[int] | None = None,
    margins: np.ndarray | None = None,
    mode: PipelineMode = PipelineMode.SERIAL,
    trim: TrimRule | None = None,
) -> StepRecord:
    """A step of a sequence for each letter. Unless told: K draft tokens each, all rows through the whole target."""
    drafted = np.full(len(kinds), K) if num_drafted is None else np.array(num_drafted)
    kept = drafted + 1 if num_kept is None else np.array(num_kept)
    accepted = np.array(num_accepted)
    return StepRecord(
        StepPlan(Decision(drafted.tolist(), mode, trim=trim), InFlight.empty(), decodes=batch(kinds)),
        Frontier(np.zeros((len(kinds), K), np.int64), drafted, drafted + 1, margins),
        Verification(np.zeros((0, 1), np.float32), np.zeros(len(kinds) + 1, np.int64), kept, 0),
        Acceptance(np.zeros((len(kinds), K + 1), np.int64), accepted, accepted + 1),
        np.ones(len(kinds), np.int64),
        0,
        0,
        0.0,
        0.0,
        0.0,
    )


class Drawn(NamedTuple):
    """Outcome of a random step of B sequences; some chains are empty, of some rows were pruned."""

    kinds: str
    num_accepted: np.ndarray  # [B]
    num_drafted: np.ndarray  # [B]
    num_kept: np.ndarray  # [B]
    margins: np.ndarray  # [B, K]

    def record(self, rows: list[int] | None = None, **options: Any) -> StepRecord:
        """The record of the step, or of some of its rows as if they had been a step of their own."""
        rows = list(range(len(self.kinds))) if rows is None else rows
        accepted, drafted, kept = (column[rows].tolist() for column in self[1:4])
        kinds, margins = "".join(self.kinds[b] for b in rows), self.margins[rows]
        return record(kinds, accepted, num_drafted=drafted, num_kept=kept, margins=margins, **options)


def drawn(rng: np.random.Generator, kinds: str) -> Drawn:
    num_drafted = rng.integers(0, K + 1, len(kinds))
    num_kept = rng.integers(1, num_drafted + 2)
    passes = rng.random((len(kinds), K)) < np.array([[RATES[kind]] for kind in kinds])
    num_accepted = np.minimum(np.cumprod(passes, axis=1).sum(axis=1), np.minimum(num_drafted, num_kept))
    margins = rng.exponential(2.5, (len(kinds), K)).astype(np.float32)
    return Drawn(kinds, num_accepted, num_drafted, num_kept, margins)


def random_kinds(rng: np.random.Generator) -> str:
    return "".join(rng.choice(list("gs"), rng.integers(1, 9)))
