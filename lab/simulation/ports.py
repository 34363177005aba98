"""The engine's ports in virtual time: a clock that calls alone advance, lanes, a runner, a sampler and a proposer.

Step overhead is charged by the runner, all but that of trimming: what surrounds a verification with the target's call
that yields logits, and with it what a round of drafting costs where drafted rows are verified; what surrounds a draft
call with that call, an exit's with its scores. Prompts pay for their rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import NoReturn

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.errors import ConfigError, Failure
from faser_backend.core.frontier import Frontier
from faser_backend.core.ports import DraftTokens, Partition, PhaseTimes, Proposed, Sampler, Verified
from faser_backend.core.request import Sampling
from faser_backend.lab.simulation.acceptance import VOCAB_SIZE, Outcomes
from faser_backend.pipeline.draft import ModelProposer
from faser_backend.pipeline.propose import Proposal
from faser_backend.pipeline.rows import DecodeBatch
from faser_backend.policy.cost_model import DRAFT, CostModel

START_NS = 1_000_000_000  # not 0: a time of 0 means "never" in RequestStats


class SimClock:
    """core.ports.Clock in virtual nanoseconds."""

    def __init__(self) -> None:
        self._now_ns = START_NS

    def now_ns(self) -> int:
        return self._now_ns

    def now_s(self) -> float:
        return self._now_ns / 1e9

    def skip(self, seconds: float) -> None:
        """Advances the clock to an arrival, never short of it."""
        self._now_ns += max(math.ceil(seconds * 1e9), 1)

    def advance_us(self, duration_us: float) -> None:
        self._now_ns += round(duration_us * 1e3)

    def move_to(self, time_ns: int) -> None:
        """Back to where a lane begins, or forward to where the longer one ends."""
        self._now_ns = time_ns


class SimLanes:
    """core.ports.Lanes: both phases start at once, after the hand-over, and have ended at the later of their ends."""

    def __init__(self, clock: SimClock, hand_over_us: float) -> None:
        self._clock, self._hand_over_us = clock, hand_over_us

    def run_both(self, verify: Callable[[], Verified], propose: Callable[[], Proposed]) -> tuple[Verified, Proposed]:
        self._clock.advance_us(self._hand_over_us)
        start_ns = self._clock.now_ns()
        verified = verify()
        verified_ns = self._clock.now_ns()
        self._clock.move_to(start_ns)
        proposed = propose()
        self._clock.move_to(max(verified_ns, self._clock.now_ns()))
        return verified, proposed


class SimRunner:
    """core.ports.ModelRunner on one partition: calls take the time that a cost model predicts, and compute nothing."""

    def __init__(
        self,
        model: str,
        partition: str,
        costs: CostModel,
        clock: SimClock,
        *,
        num_layers: tuple[int, ...],  # of each segment
        exits: frozenset[int],
    ) -> None:
        assert len(num_layers) == len(costs.segments[model, partition]), "one cost per segment"
        self.num_segments, self.num_layers = len(num_layers), num_layers
        self.exits = exits
        self.vocab_size = VOCAB_SIZE
        self.max_logit_rows: int | None = None
        self.max_mixed_rows = 0 if costs.is_padded else None  # padded attention would pad every sequence to a chunk
        self._model, self._costs, self._clock = model, costs, clock
        self._predict = cache(partial(costs.call_us, model, partition))
        self._has_keys = any(each.keys.values_us.any() or each.cell_key_us for each in costs.segments[model, partition])

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        """Advances the clock. Returns [T, 1] in place of hidden states, [R, 1] in place of logits."""
        self._clock.advance_us(self._call_us(segment, rows))
        if segment < self.num_segments - 1:
            return np.zeros((rows.num_rows, 1), np.float32)
        if rows.logit_rows.size:
            self._clock.advance_us(self._overhead_us(rows))
        return np.zeros((rows.logit_rows.size, 1), np.float32)

    def run_segment_with_scores(
        self, segment: int, rows: RowBatch, hidden: np.ndarray | None, exit_candidates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As run_segment. Scores [T, C] carry the exit's place among the exits: the sampler knows its margins."""
        output = self.run_segment(segment, rows, hidden)
        self._clock.advance_us(float(self._costs.overhead.exit(rows.num_rows)))
        return output, np.full(exit_candidates.shape, sorted(self.exits).index(segment), np.float32)

    def take_rows(self, hidden: np.ndarray, kept: np.ndarray) -> np.ndarray:
        return hidden[kept]

    def _call_us(self, segment: int, rows: RowBatch) -> float:
        # Unpadded, the mean context is exact: keys are charged by their sum over the sequences.
        return float(
            self._predict(
                rows.num_rows,
                rows.num_sequences,
                self._costs.batch_context(rows.context_lens.tolist()) if self._has_keys else 0,
                max_rows=int(rows.rows_per_sequence.max()) if self._costs.is_padded else None,
                num_logit_rows=rows.logit_rows.size,
                first_segment=segment,
                last_segment=segment + 1,
            )
        )

    def _overhead_us(self, rows: RowBatch) -> float:
        overhead = self._costs.overhead
        if self._model == DRAFT:
            return float(overhead.draft_call(rows.num_sequences))
        num_rows = rows.logit_rows.size  # of the verification; prompts that the call also reads have none
        size = int(np.count_nonzero(np.diff(np.searchsorted(rows.logit_rows, rows.cu_rows))))
        return float(overhead.step(size, num_rows) + (num_rows > size) * overhead.draft_round(size))


class SimSampler:
    """core.ports.Sampler: draws from planted outcomes instead of from logits.

    Which model a row belongs to follows from the method that is called. Sample-and-match alone: under rejection
    sampling an outcome depends on draws of both models, which no path of outcomes stands for.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self.failures: dict[int, Failure] = {}  # rules are not simulated

    def add(
        self, slot: int, sampling: Sampling, token_ids: np.ndarray, num_prompt_tokens: int, end_ids: tuple[int, ...]
    ) -> None:
        self._outcomes.plant(slot, sampling.seed, num_prompt_tokens)

    def remove(self, slot: int) -> None:
        """Nothing to give back: the next request of the slot overwrites its rows."""

    def append(self, slot: int, tokens: list[int]) -> None:
        """Does nothing: outcomes do not depend on emitted tokens."""

    def has_rules(self, slots: np.ndarray) -> bool:
        return False

    def forced(self, slot: int) -> list[int]:
        """Grammars are not simulated."""
        return []

    def sample(self, logits: np.ndarray, rows: SamplingRows) -> np.ndarray:
        return self._outcomes.target(rows.slots, rows.positions)

    def sample_draft(self, logits: np.ndarray, rows: SamplingRows, num_candidates: int) -> DraftTokens:
        tokens, margins = self._outcomes.draft(rows.slots, rows.positions)
        candidates = (tokens[:, None] + np.arange(num_candidates)) % VOCAB_SIZE if num_candidates else None
        return DraftTokens(tokens, margins, candidates)

    def candidate_margins(
        self, scores: np.ndarray, candidates: np.ndarray, rows: SamplingRows, *, with_noise: bool
    ) -> np.ndarray:
        if not scores.size:
            return np.zeros(0, np.float32)
        return self._outcomes.exit_margins(rows.slots, rows.positions, int(scores[0, 0]))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError("logits, log-probabilities and acceptance = 'rejection': are not simulated")

    probabilities = uniforms = log_probs = to_host = _refuse


class SimProposer(ModelProposer):
    """ModelProposer in virtual time. Deciding by confidence is part of drafting, and so of the lane that drafts, but of
    no model call: the runner cannot charge it."""

    def __init__(
        self,
        sampler: Sampler,
        times: PhaseTimes,
        block_tables: np.ndarray,  # [max_num_seqs, max_blocks], by slot
        clock: SimClock,
        costs: CostModel,
    ) -> None:
        super().__init__(sampler, times, block_tables, keeps_probs=False)
        self._clock, self._costs = clock, costs

    def propose(self, partition: Partition, batch: DecodeBatch, proposal: Proposal) -> Frontier:
        """As ModelProposer. Under a trim rule every draft call costs a decision on the chains that it made longer, and
        the round one on rows."""
        at_once = self._costs.drafts_at_once  # no chain ends early
        frontier = super().propose(partition, batch, replace(proposal, trim=None) if at_once else proposal)
        if proposal.trim is not None and not at_once:
            last = frontier.drafted.shape[1]  # calls; the decision about rows concerns all chains
            num_active = np.count_nonzero(np.arange(last + 1)[:, None] % last < frontier.num_drafted, axis=1)
            self._clock.advance_us(float(np.sum(self._costs.overhead.trim_call(num_active))))
            self.times.lap("draft_sample")
        return frontier
