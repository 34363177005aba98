"""`schedule:4:4,8:2,32:1`: a speculative length for each batch size, as TensorRT-LLM's draft_len_schedule.

Reads: up to 4 running requests draft 4 tokens, up to 8 draft 2, up to 32 draft 1, more draft none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from faser_backend.core.decision import WHOLE, Decision
from faser_backend.core.errors import ConfigError
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence


class LengthSchedule:
    """limits: ascending batch sizes; lengths: num_draft_tokens up to each of them."""

    is_drafting = True
    partitions = (WHOLE,)

    def __init__(self, limits: list[int], lengths: list[int]) -> None:
        self.limits = limits
        self.lengths = [*lengths, 0]

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        length = self.lengths[bisect_left(self.limits, len(sequences))]
        return Decision([length] * len(sequences))

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""


def parse_schedule(spec: str, argument: str, max_draft_tokens: int) -> LengthSchedule:
    """Raises ConfigError naming the pair that is wrong."""
    limits: list[int] = []
    lengths: list[int] = []
    for pair in argument.split(","):
        limit, _, length = pair.partition(":")
        if not all(part.isascii() and part.isdigit() for part in (limit, length)):
            raise ConfigError(f"policy = {spec!r}: {pair!r} must be BATCH:LENGTH, two integers")
        limits.append(int(limit))
        lengths.append(int(length))
        if lengths[-1] > max_draft_tokens:
            raise ConfigError(f"policy = {spec!r}: length {length} must lie in [0, {max_draft_tokens}]")
    if limits != sorted(set(limits)) or limits[0] < 1:
        raise ConfigError(f"policy = {spec!r}: batch sizes {limits} must ascend from 1 or more")
    return LengthSchedule(limits, lengths)
