"""Planted acceptance for models whose weights mean nothing: every result that uses it is synthetic.

Draft and target run whole, their logits are sampled by the real sampler, and what it draws is then replaced by tokens
of an acceptance process: a pure function of (request seed, position). So acceptance is set by a parameter while every
kernel, copy and wait of a step stays. The process is the one fitted to the demo pair (simulation/acceptance.py),
shifted to the wanted rate: chances vary by request and position, and the draft's margin tells some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.ports import DeviceArray, DraftLoop, DraftTokens, DraftTrees, Sampler
from faser_backend.core.request import SamplingParams
from faser_backend.core.tree import TreeLaw
from lab.gpu.economics import expected_accepted
from lab.profiling.exit_fit import area_under_curve
from lab.simulation.acceptance import AcceptanceProcess, Outcomes, demo_process

ACCEPTANCE = 0.75  # of draft tokens whose prefix was accepted
EXIT_AUC = 0.80  # with which a planted exit score tells a doomed token, beyond the draft's margin


def planted_process(acceptance: float = ACCEPTANCE, exit_auc: float | None = EXIT_AUC) -> AcceptanceProcess:
    """The demo pair's process at temperature 0.8, at another mean acceptance and with one exit of a stated quality."""
    process = demo_process("sampled").at_level(acceptance)
    return process if exit_auc is None else process.with_exits((exit_auc,))


class PlantedSampler:
    """core.ports.Sampler: the real one does all of its work, then its tokens give way to planted ones."""

    def __init__(self, real: Sampler, outcomes: Outcomes) -> None:
        self._real, self._outcomes = real, outcomes

    def add(
        self,
        slot: int,
        sampling: SamplingParams,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        end_ids: tuple[int, ...],
    ) -> None:
        self._real.add(slot, sampling, token_ids, num_prompt_tokens, end_ids)
        self._outcomes.plant(slot, sampling.seed, num_prompt_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def sample(self, logits: DeviceArray, rows: SamplingRows) -> np.ndarray:
        self._real.sample(logits, rows)
        return self._outcomes.target(rows.slots, rows.positions)

    def sample_draft(self, logits: DeviceArray, rows: SamplingRows, num_candidates: int) -> DraftTokens:
        drawn = self._real.sample_draft(logits, rows, num_candidates)
        return planted_draft(drawn, *self._outcomes.draft(rows.slots, rows.positions))

    def candidate_margins(
        self, scores: DeviceArray, candidates: np.ndarray, rows: SamplingRows, *, with_noise: bool
    ) -> np.ndarray:
        self._real.candidate_margins(scores, candidates, rows, with_noise=with_noise)
        return self._outcomes.exit_margins(rows.slots, rows.positions)


class PlantedDraftLoop:
    """core.ports.DraftLoop: the device drafts with tokens of its own, and planted ones are handed on."""

    def __init__(self, real: DraftLoop, outcomes: Outcomes) -> None:
        self._real, self._outcomes = real, outcomes
        self.can_draft = real.can_draft

    def draft(
        self, rows: RowBatch, slots: np.ndarray, num_draft_tokens: np.ndarray, num_candidates: int
    ) -> DraftTokens:
        drawn = self._real.draft(rows, slots, num_draft_tokens, num_candidates)
        first = rows.context_lens + rows.rows_per_sequence  # [A] positions of the first new tokens
        positions = first[:, None] + np.arange(drawn.tokens.shape[1])
        return planted_draft(drawn, *self._outcomes.draft(slots[:, None], positions))

    def can_draft_trees(self, slots: np.ndarray, num_draft_tokens: np.ndarray) -> bool:
        """Chains alone are planted."""
        return False

    def draft_trees(self, rows: RowBatch, slots: np.ndarray, law: TreeLaw) -> DraftTrees:
        raise NotImplementedError


def planted_draft(drawn: DraftTokens, tokens: np.ndarray, margins: np.ndarray) -> DraftTokens:
    """What was drawn, with planted tokens and margins; the other candidates stay."""
    candidates = drawn.candidates
    if candidates is not None:
        candidates = np.concatenate([tokens[..., None], candidates[..., 1:]], axis=-1)
    return DraftTokens(tokens, margins, candidates)


def process_in_words(process: AcceptanceProcess, lengths: Sequence[int] = (2, 4, 8)) -> dict[str, float]:
    """What a reader must know of a process: rate, accepted tokens per chain, and how much margins tell."""
    margins, matches, exit_margins = process.sample(200, 128)
    found = {"acceptance": float(matches.mean()), "margin_auc": area_under_curve(margins.ravel(), matches.ravel())}
    for length in lengths:
        found[f"mean_accepted_{length}"] = expected_accepted(matches, length)
    if len(exit_margins):
        found["exit_auc"] = area_under_curve(exit_margins[0].ravel(), matches.ravel())
    return found
