"""The goals of the GPU path and what a results file says of each. Pure: JSON in, rows out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Parts = dict[str, dict[str, Any]]  # results by part
Row = dict[str, Any]
PAIR_PART = "ladder-8b"
LEAST_HEADROOM = 0.02  # of the reference: with less, a share of it is chance


@dataclass(frozen=True, slots=True)
class Goal:
    """value: what the results say, None where they say nothing. is_most: the value may not exceed the limit."""

    name: str
    limit: float
    value: Callable[[Parts], float | None]
    unit: str = ""
    is_most: bool = False

    def is_met(self, value: float) -> bool:
        return value <= self.limit if self.is_most else value >= self.limit


def judged(parts: Parts) -> list[tuple[Goal, float | None, str]]:
    """Every goal, its value and a word: met, missed, not measured."""
    rows = []
    for goal in GOALS:
        value = goal.value(parts)
        word = "not measured" if value is None else "met" if goal.is_met(value) else "missed"
        rows.append((goal, value, word))
    return rows


def row_of(parts: Parts, part: str, policy: str, load: str) -> Row | None:
    rows = parts.get(part, {}).get("rows", [])
    return next((row for row in rows if row["policy"] == policy and row["load"] == load), None)


def ratio(parts: Parts, part: str, load: str, over: str, under: str, *, field: str = "tokens_per_s") -> float | None:
    """A field of policy `over` by that of policy `under`."""
    rows = row_of(parts, part, over, load), row_of(parts, part, under, load)
    if rows[0] is None or rows[1] is None or not rows[1][field]:
        return None
    return rows[0][field] / rows[1][field]


def _attention(parts: Parts) -> float | None:
    """The worse of 1 and 5 rows at batch 32, context 1024."""
    rows = parts.get("bandwidth", {}).get("attention", [])
    shares = [row["share_of_copy"] for row in rows if (row["batch"], row["context"]) == (32, 1024)]
    return min(shares, default=None)


def _overlap(parts: Parts) -> float | None:
    """Of the best split at the largest batch: time both ran over the shorter one's."""
    rows = [row for row in parts.get("latency", {}).get("latency", []) if "overlap_of_shorter" in row]
    largest = max((row["batch"] for row in rows), default=0)
    return max((row["overlap_of_shorter"] for row in rows if row["batch"] == largest), default=None)


def _headroom(parts: Parts) -> float | None:
    """How much of what the oracle saves over fixed:4 of the mean latency `faser` saves, on the bursty load."""
    names = ("fixed:4", "faser", "oracle")
    rows = [row_of(parts, PAIR_PART, name, "bursty") for name in names]
    means = [row["e2e_ms_mean"] for row in rows if row is not None]
    if len(means) < len(names) or means[0] - means[2] <= LEAST_HEADROOM * means[0]:
        return None
    return (means[0] - means[1]) / (means[0] - means[2])


def _contact(parts: Parts) -> float | None:
    checks = parts.get("first", {}).get("checks", [])
    return sum(check["found"] != "ok" for check in checks) if checks else None


def _steps(parts: Parts) -> float | None:
    """The worse of target and draft at one row: the time to read their weights once over that of a replayed step."""
    rows = [row for row in parts.get("first", {}).get("steps", []) if row["rows"] == 1]
    return min((row["share_of_floor"] for row in rows), default=None)


def _against_none(parts: Parts) -> float | None:
    """The least ratio of faser over none, over all loads and ladders."""
    ladders = {part: result for part, result in parts.items() if part.startswith("ladder")}
    ratios = [
        found
        for part, result in ladders.items()
        for load in dict.fromkeys(row["load"] for row in result.get("rows", []))
        if (found := ratio(parts, part, load, "faser", "none")) is not None
    ]
    return min(ratios, default=None)


def _scheduler(parts: Parts) -> float | None:
    rows = [row for row in parts.get(PAIR_PART, {}).get("rows", []) if row["policy"] == "faser"]
    return max((100.0 * row["plan_share"] for row in rows), default=None)


def _greedy(parts: Parts) -> float | None:
    """Greedy answers of runtime torch in fp32 that differ, near-ties aside."""
    types = [each for each in parts.get("parity", {}).get("dtypes", []) if each["dtype"] == "fp32"]
    greedy = [answer for each in types for answer in each.get("answers", []) if answer["temperature"] == 0]
    if not greedy:
        return None
    return sum(answer["num_answers"] - answer["num_equal"] - answer["num_near_ties"] for answer in greedy)


def _kernels(parts: Parts) -> float | None:
    cases = parts.get("kernels", {}).get("cases", [])
    return sum(not case["is_right"] for case in cases) if cases else None


def _leaks(parts: Parts) -> float | None:
    """Splits whose shares were seen on SMs of each other, or on more than they own."""
    splits = parts.get("sms", {}).get("splits", [])
    names = ("is_disjoint", "is_draft_within_size", "is_target_within_size")
    return sum(not all(split["checks"][name] for name in names) for split in splits) if splits else None


GOALS = (
    Goal("checks of first contact that failed", 0, _contact, is_most=True),
    Goal("step of one row, share of its floor (8B pair, the worse model)", 0.60, _steps),
    Goal("kernels that differ from their references", 0, _kernels, is_most=True),
    Goal("attention, share of copy bandwidth (batch 32, context 1024)", 0.80, _attention),
    Goal("SM splits that leak", 0, _leaks, is_most=True),
    Goal("draft || target, overlap share (8B pair, best split)", 0.70, _overlap),
    Goal("greedy answers that differ, near-ties aside (torch fp32)", 0, _greedy, is_most=True),
    Goal("mean latency, faser's share of the oracle's headroom, bursty (8B pair)", 0.15, _headroom),
    Goal("throughput, faser / none, worst load of all", 1.0, _against_none, "x"),
    Goal("scheduler and policy, share of a step (8B pair, faser)", 5.0, _scheduler, " %", is_most=True),
)
