"""A policy's decision for one step: lengths, trimming, early exit, pipeline mode and partition.

A decision is data that can be printed, compared and simulated. The scheduler and the pipeline apply it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from faser_backend.core.frontier import Frontier

WHOLE = "whole"  # the partition of the whole device; splits are named "draft share/target share", e.g. "1/1"
MAX_VERIFIED_ROWS = 512  # of a step with drafts: a GPU captures no larger calls, and plans no memory for their logits


class PipelineMode(Enum):
    """How drafting and verification follow each other."""

    SERIAL = "serial"  # in turn, on the whole device
    RUN_AHEAD = "run_ahead"  # the draft goes on behind a frontier while the target verifies it
    PING_PONG = "ping_pong"  # one cohort drafts while the other is verified


@dataclass(frozen=True, slots=True, eq=False)
class TrimRule:
    """Confidence trimming: which draft tokens are worth drafting and which rows worth verifying (pipeline/trim.py).

    The chance that a draft token is accepted is sigmoid(match_logits, read at its margin, + the request's offset).
    margin_shares [M] sum to 1: how often such margins occur.
    """

    margin_knots: np.ndarray  # [M] ascending
    match_logits: np.ndarray  # [M], or [S, M] by source of chains (core/frontier.py) where there are several
    margin_shares: np.ndarray  # [M]
    offsets: np.ndarray  # [S] by slot, of all slots, or [1] for all
    verify_us: np.ndarray  # [N + 1] predicted time of a step with n rows beside the anchors, without drafting
    draft_us: np.ndarray  # [B + 1] predicted time of a draft call for so many of the sequences
    tokens_per_us: float  # the price: throughput at the optimum, which converts time to tokens
    row_price: float  # tokens that the time of one more row is worth, at the usual number of rows
    draft_round_us: float = 0.0  # predicted time of drafting, beside its calls

    @property
    def main_logits(self) -> np.ndarray:
        """[M] log odds for the engine's drafter."""
        return self.match_logits[0] if self.match_logits.ndim == 2 else self.match_logits

    def draft_price(self, num_chains: int) -> float:
        """Returns the tokens that the time of a draft call for num_chains is worth; past draft_us, its last entry."""
        return self.tokens_per_us * float(self.draft_us[min(num_chains, self.draft_us.size - 1)])


@dataclass(frozen=True, slots=True, eq=False)
class ExitView:
    """B chains of at most K draft tokens, as known at an exit; entries past a chain have no meaning.

    exit_margins[b, j]: by how much drafted[b, j] leads the draft's other candidates in the scores that row
    j gives at this exit, in logits, noise included.
    """

    segment: int  # the one that was just run
    exit_margins: np.ndarray  # [B, K]
    frontier: Frontier
    num_rows: np.ndarray  # [B] rows that are not pruned yet
    slots: np.ndarray  # [B]


class Pruner(Protocol):
    """Token-wise early exit: predicts rejections between target segments."""

    @property
    def exits(self) -> frozenset[int]:
        """Segments after which it reads scores."""
        ...

    @property
    def num_candidates(self) -> int:
        """Tokens that the exit head scores per row, the drafted token included."""
        ...

    def keep(self, view: ExitView) -> np.ndarray:
        """Returns the rows [B] to keep, in [1, view.num_rows]. Row j (which processes drafted[:, j - 1]) may be pruned
        because of entries [:, :j] of the view, never because of later ones: N must be a stopping time."""
        ...


class Score(NamedTuple):
    """A candidate: a way to run the next steps, with the predicted totals of such a step over the batch."""

    mode: PipelineMode | None  # None = plain decoding
    partition: str
    num_draft_tokens: int  # at most, per chain
    floor: float  # chains whose survival falls below it end; 0 = all chains have one length
    num_rows: float  # verified beside the anchors
    num_accepted: float  # draft tokens, as the curves alone predict
    num_tokens: float  # emitted
    step_us: float

    @property
    def tokens_per_us(self) -> float:
        return self.num_tokens / self.step_us


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """A decision for the B sequences that are ready to decode. Only num_draft_tokens is required."""

    num_draft_tokens: list[int]  # [B], 0 = plain decoding; the scheduler clips it to what a request can use
    mode: PipelineMode = PipelineMode.SERIAL
    partition: str = WHOLE
    trim: TrimRule | None = None
    pruner: Pruner | None = None
    prefills_draft: bool = True  # the draft reads prompts too; else it catches up before it drafts
    tokens_per_us: float = 0.0  # the price that it was made by; 0: none
    scores: tuple[Score, ...] = ()  # of all candidates, for --explain and traces
    reason: str = ""  # in words, for the same readers
