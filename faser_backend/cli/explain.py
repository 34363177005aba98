"""`faser generate --explain`: why each stretch of steps was run as it was, as a table of what was weighed."""

from __future__ import annotations

from collections.abc import Callable

from faser_backend.core.decision import WHOLE, Score
from faser_backend.core.record import StepRecord


class Explainer:
    """An observer of steps that tells when candidates were weighed anew; silent under policies that weigh nothing."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._shown: tuple[Score, ...] = ()
        self._num_steps = 0

    def observe(self, record: StepRecord) -> None:
        self._num_steps += 1
        decision = record.plan.decision
        if not decision.scores or decision.scores is self._shown:
            return
        self._shown = decision.scores
        why = "explores" if decision.reason == "exploration" else "runs"
        mode = decision.mode.value if any(decision.num_draft_tokens) else "plain"
        size = record.num_tokens.size
        self._tell(f"-- step {self._num_steps}: {size} request(s), {why} {mode} on {decision.partition}")
        self._tell(score_table(decision.scores))


def score_table(scores: tuple[Score, ...]) -> str:
    """Returns a line per candidate, the best one marked."""
    best = max(scores, key=lambda score: score.tokens_per_us)
    lines = ["   way                      draft  floor  tokens  time us  tokens/ms"]
    for score in scores:
        way = "plain" if score.mode is None else score.mode.value
        if score.partition != WHOLE:
            way += f" on {score.partition}"
        lines.append(
            f" {'*' if score is best else ' '} {way:24} {score.num_draft_tokens:5} {score.floor:6.2f} "
            f"{score.num_tokens:7.2f} {score.step_us:8.0f} {1e3 * score.tokens_per_us:10.3f}"
        )
    return "\n".join(lines)
