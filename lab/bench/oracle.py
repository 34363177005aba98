"""The oracle on a real engine: it drafts exactly the tokens that will be accepted, which it learned in its warm-up.

Under sample-and-match, the text alone decides whether a draft token is accepted, so one earlier answer is enough. For
an unknown text the oracle drafts at full length and records the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence

from faser_backend.core.decision import Decision
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.lab.simulation.engine import OraclePolicy
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.cost_model import CostModel
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS

Text = tuple[bytes, int, float]  # prompt, seed, temperature: they determine an answer


class ReplayOracle(OraclePolicy):
    """An OraclePolicy that learns the outcomes from a first pass over the same requests."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._outcomes: dict[Text, dict[int, bool]] = {}  # by text and position: whether the draft is accepted there

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        is_new = [each.num_tokens not in self._known(each) for each in sequences]
        if not any(is_new):
            return super().decide(sequences, num_prefilling)
        known = zip(sequences, is_new, strict=True)
        return Decision([MAX_ADAPTIVE_TOKENS if new else self._num_accepted(each) for each, new in known])

    def observe(self, record: StepRecord) -> None:
        rows = zip(
            record.plan.decodes,
            record.num_tokens.tolist(),
            record.acceptance.num_accepted.tolist(),
            record.num_testable.tolist(),
            strict=True,
        )
        for sequence, start, num_accepted, num_testable in rows:
            known = self._known(sequence)
            known.update((start + index, True) for index in range(num_accepted))
            if num_accepted < num_testable:
                known[start + num_accepted] = False

    def _num_accepted(self, sequence: RunningSequence) -> int:
        known, count = self._known(sequence), 0
        while count < MAX_ADAPTIVE_TOKENS and known.get(sequence.num_tokens + count, False):
            count += 1
        return min(count, sequence.num_remaining_tokens - 1)

    def _known(self, sequence: RunningSequence) -> dict[int, bool]:
        sampling = sequence.request.sampling
        text = sequence.request.prompt_ids.tobytes(), sampling.seed, sampling.temperature
        return self._outcomes.setdefault(text, {})


def make_oracle(engine: Engine, costs: CostModel) -> None:
    """Replaces an engine's policy by the oracle. Call before its first step."""
    oracle = ReplayOracle(costs)
    engine.step_runner.scheduler.policy = oracle
