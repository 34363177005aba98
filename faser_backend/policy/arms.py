"""The ways to spend a step that the controller weighs, and what each promises: tokens per microsecond.

An arm is a pipeline mode on a partition, or plain decoding. Times come from the cost model, yields from running
means of recent rounds; formulas after the economics of overlapped drafting in docs/policies.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser_backend.core.decision import WHOLE, PipelineMode
from faser_backend.policy.pricing import BatchTimes, Pricer

MAX_FRONTIER = 6  # longest frontier of a chain that is run ahead of


class Arm(NamedTuple):
    """mode None = plain decoding."""

    mode: PipelineMode | None
    partition: str = WHOLE


class Promise(NamedTuple):
    """Predicted speed of an arm, and the draft tokens per sequence where the arm fixes them."""

    tokens_per_us: float
    num_draft_tokens: int | None = None


PLAIN = Arm(None)
SERIAL = Arm(PipelineMode.SERIAL)


def arms_on(partitions: tuple[str, ...]) -> tuple[Arm, ...]:
    """Plain and serial on the whole device, and both overlapped modes on every split."""
    splits = [name for name in partitions if name != WHOLE]
    overlapped = [Arm(mode, name) for name in splits for mode in (PipelineMode.PING_PONG, PipelineMode.RUN_AHEAD)]
    return (PLAIN, SERIAL, *overlapped)


def promise(pricer: Pricer, arm: Arm, size: int, context: int) -> Promise:
    """What the arm promises for `size` sequences; a speed of 0 where it makes no sense."""
    if arm.mode is PipelineMode.PING_PONG:
        return Promise(_ping_pong_speed(pricer, arm.partition, size, context))
    times = pricer.times(size, context, arm.partition)
    if arm.mode is None:
        return Promise(pricer.plain_speed(times), 0)
    if arm.mode is PipelineMode.SERIAL:
        return Promise(pricer.serial_speed(times))
    speeds = [_run_ahead_speed(pricer, times, size, length) for length in range(1, MAX_FRONTIER + 1)]
    best = int(np.argmax(speeds))
    return Promise(speeds[best], best + 1)


def _ping_pong_speed(pricer: Pricer, partition: str, size: int, context: int) -> float:
    """Two cohorts take turns: one drafts while the other is verified, nothing is discarded."""
    if size < 2:
        return 0.0
    half = size // 2
    times = pricer.times(half, context, partition)
    means = pricer.means
    num_extra = (means.rows - 1.0) * half
    step_us = max(times.verify_us(num_extra, means.draft_calls), pricer.propose_us(times))
    step_us += times.step_overhead_us(num_extra) + pricer.costs.overhead.lanes_us
    return half * means.tokens / step_us


def _run_ahead_speed(pricer: Pricer, times: BatchTimes, size: int, length: int) -> float:
    """Frontiers of `length` tokens, drafted while the ones before them are verified.

    With a the chance that a whole frontier is accepted, a verification yields its accepted tokens and, unless all
    were, the recovered one; then the chain ahead is discarded and one step goes by in which the sequence only
    drafts. Alone, that step costs the drafting; in a batch the others are verified meanwhile.
    """
    chance = pricer.match.mean_chance
    whole = chance**length
    tokens = chance * (1.0 - whole) / (1.0 - chance) + (1.0 - whole)
    propose_us = length * float(times.draft_us[size])
    overhead_us = times.step_overhead_us((length - 1.0) * size) + pricer.costs.overhead.lanes_us
    if size == 1:
        verify_us = times.verify_us(length - 1.0, length - 1.0)
        return tokens / (max(verify_us, propose_us) + overhead_us + (1.0 - whole) * propose_us)
    share = 1.0 / (2.0 - whole)  # of the sequences that are verified in a step
    verify_us = times.verify_us((length - 1.0) * size * share, length - 1.0)
    return size * share * tokens / (max(verify_us, propose_us) + overhead_us)
