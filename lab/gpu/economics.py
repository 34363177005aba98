"""What a step should take and yield, from measured calls and a known chance of acceptance: pure formulas.

The serial and the pipelined round of the project's economics, so that a measured ladder can be put beside them and
the term that is missing named.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Round(NamedTuple):
    """One round of a batch: microseconds, and tokens per request."""

    us: float
    tokens: float

    def tokens_per_s(self, num_sequences: int) -> float:
        return num_sequences * self.tokens / self.us * 1e6


def expected_accepted(matches: np.ndarray, num_draft_tokens: int) -> float:
    """Mean accepted tokens of chains that start anywhere in texts; matches [num_texts, num_positions]."""
    windows = np.lib.stride_tricks.sliding_window_view(matches, num_draft_tokens, axis=1)
    return float(np.cumprod(windows, axis=-1).sum(axis=-1).mean())


def chance_whole(matches: np.ndarray, num_draft_tokens: int) -> float:
    """How often a whole chain is accepted."""
    windows = np.lib.stride_tricks.sliding_window_view(matches, num_draft_tokens, axis=1)
    return float(windows.all(axis=-1).mean())


def serial_round(draft_us: float, verify_us: float, accepted: float) -> Round:
    """Drafting, then verification: T_d(f) + T_v for E[accepted] + 1 tokens."""
    return Round(draft_us + verify_us, accepted + 1.0)


def run_ahead_round(draft_us: float, verify_us: float, accepted: float, whole: float) -> Round:
    """The draft goes on behind the frontier: max(T_v, T_d) + (1 - a) T_d for E[accepted] + 1 - a tokens.

    Times are those on the shares of a split while both work. whole: a, the chance that the whole frontier is
    accepted, so that what was drafted behind it is of use.
    """
    return Round(max(verify_us, draft_us) + (1.0 - whole) * draft_us, accepted + 1.0 - whole)


def ping_pong_round(draft_us: float, verify_us: float, accepted: float) -> Round:
    """Two cohorts, one drafting while the other is verified: a round of both takes twice the longer phase.

    Times are those of half the batch, on the shares of a split while both work.
    """
    return Round(2.0 * max(verify_us, draft_us), accepted + 1.0)


def overlap_share(alone_a_us: float, alone_b_us: float, together_us: float) -> float:
    """How much of what could be hidden was: 1 where both together take as long as the longer alone, 0 as in turn."""
    hidden = alone_a_us + alone_b_us - together_us
    return hidden / min(alone_a_us, alone_b_us)


def common_us(spans_a: np.ndarray, spans_b: np.ndarray) -> float:
    """Time in which both work; spans [n, 2] and [m, 2] of starts and ends, each sorted and free of overlaps."""
    starts = np.maximum(spans_a[:, None, 0], spans_b[None, :, 0])
    ends = np.minimum(spans_a[:, None, 1], spans_b[None, :, 1])
    return float(np.maximum(ends - starts, 0.0).sum())
