"""Policies to compare with: fixed lengths, none among them, and the best common length by prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_backend.core.decision import WHOLE, Decision
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.cost_model import BatchTimesCache, CostModel

PRIOR_ACCEPTANCE = 0.6  # until there is evidence
PRIOR_TESTS = 8.0  # how many tests of its own outweigh what a request inherits from the batch
MAX_ACCEPTANCE = 0.98


class WithoutLearning:
    """A policy that learns nothing and never asks for a part of the device."""

    is_drafting = True
    partitions = (WHOLE,)

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""


class FixedLength(WithoutLearning):
    """The same number of draft tokens for every request in every step (vLLM's num_speculative_tokens).

    0 is plain decoding.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.is_drafting = num_draft_tokens > 0

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        return Decision([self.num_draft_tokens] * len(sequences))


class Goodput(WithoutLearning):
    """The one length for the whole batch that promises most tokens per time, after SmartSpec (arXiv 2406.14066).

    With a_b the chance that a drafted token of request b is kept, read from the counts that sequences carry, a round
    of K drafted tokens emits (1 - a_b^(K+1)) / (1 - a_b) tokens of b; the cost model tells what the round takes.
    Length 0 is a candidate like any other, so a batch that does not gain does not speculate.
    """

    def __init__(self, costs: CostModel, max_draft_tokens: int) -> None:
        self._costs, self._times = costs, BatchTimesCache(costs, max_draft_tokens)
        self._lengths = np.arange(max_draft_tokens + 1)  # [K + 1] candidates

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        emitted = expected_tokens(acceptance_rates(sequences), self._lengths).sum(axis=0)  # [K + 1]
        context = self._costs.batch_context([sequence.num_tokens for sequence in sequences])
        best = int((emitted / self.round_us(len(sequences), context)).argmax())
        return Decision([best] * len(sequences))

    def round_us(self, num_sequences: int, context: int) -> np.ndarray:
        """Returns the predicted microseconds [K + 1] of a serial round, for each candidate length."""
        times, lengths = self._times.of(num_sequences, context, WHOLE), self._lengths
        draft_us = lengths * times.draft_us[num_sequences] + (lengths > 0) * times.draft_round_us
        return draft_us + times.verify_us[num_sequences * lengths]


def acceptance_rates(sequences: Sequence[RunningSequence]) -> np.ndarray:
    """Returns the chance [B] that a tested draft token is kept: a request's own counts, shrunk to the batch's."""
    accepted, tested = np.array([sequence.server_acceptance for sequence in sequences], np.float64).T  # [B] each
    shared = (accepted.sum() + PRIOR_ACCEPTANCE * PRIOR_TESTS) / (tested.sum() + PRIOR_TESTS)
    return np.minimum((accepted + shared * PRIOR_TESTS) / (tested + PRIOR_TESTS), MAX_ACCEPTANCE)


def expected_tokens(rates: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the tokens [B, N] that a round emits, bonus or recovered token included (Leviathan 2211.17192, eq. 1)."""
    return (1.0 - rates[:, None] ** (lengths + 1)) / (1.0 - rates[:, None])
