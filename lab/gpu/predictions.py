"""What the economics formula says of a contestant, from measured calls and the planted process, beside what it did.

The difference names the missing term: time_ratio is what a round took over what its calls alone take, yield_ratio the
tokens of a round over those expected; their quotient is about speed_ratio, but for starts and ends of requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel
from lab.gpu.economics import (
    Round,
    chance_whole,
    expected_accepted,
    ping_pong_round,
    run_ahead_round,
    serial_round,
)


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
