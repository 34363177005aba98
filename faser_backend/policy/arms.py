"""The ways to spend a step that the controller weighs, and what each promises: tokens per microsecond.

An arm is a pipeline mode on a partition, or plain decoding. Times come from the cost model, yields from how far chains
survive, for rounds in which all sequences draft alike; docs/policies.md derives the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser_backend.core.decision import WHOLE, PipelineMode
from faser_backend.policy.pricing import BatchTimes, Pricer


class Arm(NamedTuple):
    """mode None = plain decoding."""

    mode: PipelineMode | None
    partition: str = WHOLE
    is_trimmed: bool = True  # lengths and rows by confidence, where the mode allows it; else all draft alike


class Place(NamedTuple):
    """What an arm is chosen for. level: a power of two of sequences; is_sampled: most requests do not decode greedily.

    What is learned of an arm's time holds for a level, what is learned of its yield for a kind of requests.
    """

    level: int
    is_sampled: bool


class Promise(NamedTuple):
    """Predicted speed of an arm, and the draft tokens per sequence where the arm fixes them."""

    tokens_per_us: float
    num_draft_tokens: int | None = None


PLAIN = Arm(None)
SERIAL = Arm(PipelineMode.SERIAL)
UNIFORM = Arm(PipelineMode.SERIAL, is_trimmed=False)


def arms_on(partitions: tuple[str, ...]) -> tuple[Arm, ...]:
    """Plain and serial on the whole device, trimmed or not, and both overlapped modes on every split."""
    splits = [name for name in partitions if name != WHOLE]
    overlapped = [Arm(mode, name) for name in splits for mode in (PipelineMode.PING_PONG, PipelineMode.RUN_AHEAD)]
    return (PLAIN, UNIFORM, SERIAL, *overlapped)


def promise(pricer: Pricer, arm: Arm, size: int, context: int) -> Promise:
    """What the arm promises for `size` sequences; a speed of 0 where it makes no sense."""
    if arm.mode is PipelineMode.PING_PONG:
        return Promise(_ping_pong_speed(pricer, arm.partition, size, context))
    times = pricer.times(size, context, arm.partition)
    if arm.mode is None:
        return Promise(pricer.plain_speed(times), 0)
    if arm.mode is PipelineMode.SERIAL:
        return Promise(*pricer.best_uniform(times, is_trimmed=arm.is_trimmed))
    speeds = _run_ahead_speeds(pricer, times)
    best = int(speeds.argmax())
    return Promise(float(speeds[best]), best + 1)


def _ping_pong_speed(pricer: Pricer, partition: str, size: int, context: int) -> float:
    """Two cohorts take turns: one drafts, trimmed, while the other is verified; nothing is discarded."""
    if size < 2:
        return 0.0
    times = pricer.times(size // 2, context, partition)
    draft_us = times.uniform_draft_us + times.uniform_trim_us
    step_us = np.maximum(times.uniform_target_us, draft_us) + times.uniform_overhead_us
    step_us += pricer.costs.overhead.lanes_us
    return float((times.size * pricer.uniform_tokens / step_us).max())


def _run_ahead_speeds(pricer: Pricer, times: BatchTimes) -> np.ndarray:
    """[K] for frontiers of 1..K tokens, drafted while the ones before them are verified.

    With w the chance that a whole frontier is accepted, a verification yields its accepted tokens and, unless all
    were, the recovered one; then the chain ahead is discarded and one step goes by in which the sequence only
    drafts. Alone, that step costs the drafting; in a batch the others are verified meanwhile. A frontier has no
    bonus row, so it has a row less than a uniform round of its length.
    """
    whole = pricer.beliefs.survival
    tokens = whole.cumsum() + (1.0 - whole)
    share = 1.0 / (2.0 - whole) if times.size > 1 else np.ones_like(whole)  # verified in a step
    num_extra = ((times.lengths - 1) * times.size * share).astype(np.int64)
    verify_us = times.target_us[num_extra] + (times.lengths - 1) * times.column_us
    step_us = np.maximum(verify_us, times.uniform_draft_us) + times.overhead_us[num_extra]
    step_us += pricer.costs.overhead.lanes_us
    if times.size == 1:
        step_us += (1.0 - whole) * times.uniform_draft_us
    return times.size * share * tokens / step_us
