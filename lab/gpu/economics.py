"""What a step should take and yield, from measured calls and a known chance of acceptance: pure formulas.

The serial and the pipelined round of the project's economics, so that a measured ladder can be put beside them and
the term that is missing named: time_ratio is what a round took over what its calls alone take, yield_ratio the tokens
of a round over those expected; their quotient is about speed_ratio, but for starts and ends of requests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel


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


def draft_us(costs: CostModel, partition: str, size: int, num_tokens: int, context: float) -> float:
    """A chain of num_tokens for each of size sequences."""
    return num_tokens * float(costs.call_us(DRAFT, partition, size, size, context, num_logit_rows=size))


def verify_us(costs: CostModel, partition: str, size: int, rows: int, context: float) -> float:
    return float(costs.call_us(TARGET, partition, size * rows, size, context))


def step_us(costs: CostModel, size: int, num_draft_tokens: int, context: float) -> float:
    """Calls of a serial step that drafts and verifies chains of equal length, without overhead."""
    return draft_us(costs, WHOLE, size, num_draft_tokens, context) + verify_us(
        costs, WHOLE, size, num_draft_tokens + 1, context
    )


def predicted_round(
    policy: str, costs: CostModel, split: str | None, *, size: int, context: float, matches: np.ndarray
) -> Round | None:
    """None for contestants whose rounds vary. matches [num_texts, num_positions]: where draft and target agree."""
    name, _, note = policy.partition(" (")
    if name == "none":
        return Round(verify_us(costs, WHOLE, size, 1, context), 1.0)
    if not name.startswith("fixed:") or note not in ("", "run-ahead)", "ping-pong)"):
        return None
    length = int(name.partition(":")[2])
    accepted = expected_accepted(matches, length)
    if not note:
        drafting = draft_us(costs, WHOLE, size, length, context)
        return serial_round(drafting, verify_us(costs, WHOLE, size, length + 1, context), accepted)
    if split is None or split not in costs.partitions:
        return None
    if note == "run-ahead)":  # the last draft token is the next anchor: no bonus row
        drafting = draft_us(costs, split, size, length, context)
        verifying = verify_us(costs, split, size, length, context)
        return run_ahead_round(drafting, verifying, accepted, chance_whole(matches, length))
    half = max(1, size // 2)
    drafting = draft_us(costs, split, half, length, context)
    return ping_pong_round(drafting, verify_us(costs, split, half, length + 1, context), accepted)


def with_prediction(row: dict[str, Any], found: Round | None) -> dict[str, Any]:
    """The row of a closed loop, and the prediction beside it."""
    if found is None:
        return row
    speed = found.tokens_per_s(row["num_clients"])
    predicted: dict[str, Any] = {
        "round_us": found.us,
        "tokens": found.tokens,
        "tokens_per_s": speed,
        "speed_ratio": row["tokens_per_s"] / speed,
    }
    if row["share_serial"] == 1.0:  # a round is a step
        predicted["time_ratio"] = row["step_us_p50"] / found.us
        predicted["yield_ratio"] = (1.0 + row["mean_accepted"]) / found.tokens
    return row | {"predicted": predicted}
