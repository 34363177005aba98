"""Running means of the traffic that the price rule corrects its predictions with."""

from __future__ import annotations

from faser_backend.core.decision import Score
from faser_backend.core.record import StepRecord

_YIELD_PRIOR, _YIELD_FADE = 32.0, 0.995  # tokens that a prediction of chains weighs; per sequence and step


class ChainYield:
    """What chains come to over what was predicted of them: kept tokens, and rows that were verified."""

    def __init__(self) -> None:
        self._kept = self._rows = (0.0, 0.0)  # faded sums: seen, predicted

    @property
    def tokens(self) -> float:
        return (self._kept[0] + _YIELD_PRIOR) / (self._kept[1] + _YIELD_PRIOR)

    @property
    def rows(self) -> float:
        return (self._rows[0] + _YIELD_PRIOR) / (self._rows[1] + _YIELD_PRIOR)

    def observe(self, record: StepRecord, score: Score) -> None:
        """score: what was predicted of such a step."""
        size = record.num_tokens.size
        fade = _YIELD_FADE**size
        num_kept = float(record.acceptance.num_emitted.sum()) - size
        num_rows = float(record.frontier.num_rows.sum()) - size
        self._kept = fade * self._kept[0] + num_kept, fade * self._kept[1] + score.num_accepted
        self._rows = fade * self._rows[0] + num_rows, fade * self._rows[1] + score.num_rows


class PromptTokens:
    """How many tokens of prompts are read for each token that is emitted."""

    _MEMORY, _PRIOR = 20_000.0, 2000.0  # tokens emitted: when a server starts it reads many and has emitted nothing

    def __init__(self) -> None:
        self._num_read, self._num_emitted = 0.0, self._PRIOR

    def observe(self, record: StepRecord) -> None:
        num_emitted = float(record.acceptance.num_emitted.sum())
        fade = max(1.0 - num_emitted / self._MEMORY, 0.0)
        self._num_read = fade * self._num_read + sum(chunk.num_tokens for chunk in record.plan.prefills)
        self._num_emitted = fade * self._num_emitted + num_emitted

    @property
    def per_emitted(self) -> float:
        return self._num_read / self._num_emitted
