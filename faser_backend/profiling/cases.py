"""Chooses what a profile measures: how much of everything (`Effort`), and the shapes of model calls (`Case`).

Calls have the shapes that serving makes: verifications of equal and of ragged lengths, draft calls, and prompt chunks
without logits: a grid, and some random calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.policy.cost_model import DRAFT

MAX_SEQUENCES = 32
NUM_RANDOM = 24  # beside the grid
MIN_CASES = 36  # of a model
MAX_CALL_ROWS = 256  # a prompt chunk, whose costs are linear beyond, or 32 verifications of 7 drafted tokens
MIN_SHARE = 0.1  # of the full effort
MIN_CONTEXT = 64
MAX_CALL_TOKENS = 16_384  # of context; costs are linear beyond, and more would take most of a profile's time


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a profile measures."""

    calls_s: float  # seconds of timed model calls, over all partitions
    max_sweeps: int  # of timed calls; at least 3
    case_share: float  # of all cases
    num_requests: int  # of the calibration
    num_steps: int  # of each kind, in each visit of StepMeter
    loads: tuple[int, ...] = (1, 8, 32)  # sequences in those steps

    def scaled(self, share: float) -> Effort:
        """Returns this share of everything, but not less than the fits need."""
        return replace(
            self,
            calls_s=share * self.calls_s,
            case_share=share * self.case_share,
            num_requests=max(round(share * self.num_requests), min(8, self.num_requests)),
            num_steps=max(round(share * self.num_steps), 2),
        )


def share_within(seconds: float, budget_s: float) -> float:
    """Returns the share of work of `seconds` that fits a budget, in [MIN_SHARE, 1]."""
    return min(max(budget_s / max(seconds, 1e-9), MIN_SHARE), 1.0)


FULL = Effort(120.0, 25, case_share=1.0, num_requests=128, num_steps=8)
QUICK = Effort(15.0, 7, case_share=0.5, num_requests=32, num_steps=4)


@dataclass(frozen=True, slots=True)
class Case:
    """A model call in which sequence b has counts[b] rows behind `context` tokens."""

    counts: tuple[int, ...]
    context: int
    num_logit_rows: int

    @property
    def num_rows(self) -> int:
        return sum(self.counts)

    @property
    def num_tokens(self) -> int:
        """Length of the longest sequence, with the rows of this call."""
        return self.context + max(self.counts)


def choose_cases(model: str, max_context: int, rng: np.random.Generator, share: float = 1.0) -> list[Case]:
    """Returns the cases of a model, each within max_context.

    share: of all cases; at least MIN_CASES are chosen.
    """
    cases = _uniform_grid(model, max_context) + _prefill_grid(max_context)
    cases += [_random_case(model, max_context, rng) for _ in range(NUM_RANDOM)]
    num_chosen = min(max(round(share * len(cases)), MIN_CASES), len(cases))
    # Spread evenly over the grid, ends included: the fit cannot extrapolate. One request's calls are always there: each
    # number of so few rows has a speed of its own.
    alone = [Case((n,), MIN_CONTEXT, 1 if model == DRAFT else n) for n in range(1, 6) if MIN_CONTEXT + n <= max_context]
    return alone + [cases[i] for i in np.linspace(0, len(cases) - 1, num_chosen).round().astype(int)]


def make_batch(
    case: Case, vocab_size: int, block_size: int, num_blocks: int, rng: np.random.Generator, *, room: int = 0
) -> RowBatch:
    """Returns a batch of this case, with blocks for `room` more tokens of each sequence.

    The blocks of a sequence are contiguous, as a prompt gets them while serving; on scattered blocks, 32 sequences of
    200 tokens take 1.23 times as long. If the pool is smaller than the case, blocks repeat: the values that are read
    are then wrong, but the cost is not.
    """
    counts = np.array(case.counts, np.int64)
    cu_rows = np.concatenate([[0], np.cumsum(counts)])
    blocks_each = -(-(case.num_tokens + room) // block_size)
    runs = np.resize(np.arange(num_blocks), (counts.size, blocks_each))
    blocks = rng.permutation(runs, axis=0)
    logit_rows = {0: np.zeros(0, np.int64), counts.size: cu_rows[1:] - 1}.get(case.num_logit_rows)
    return RowBatch(
        token_ids=rng.integers(0, vocab_size, case.num_rows),
        cu_rows=cu_rows,
        context_lens=np.full(counts.size, case.context),
        block_tables=blocks,
        logit_rows=np.arange(case.num_rows) if logit_rows is None else logit_rows,
    )


def _uniform_grid(model: str, max_context: int) -> list[Case]:
    """Returns cases of equal rows per sequence. A chessboard pattern keeps half of the combinations."""
    rows = (1, 2, 4) if model == DRAFT else (1, 2, 3, 5, 9)
    sequences = (1, 2, 4, 8, 16, MAX_SEQUENCES)
    contexts = np.geomspace(min(MIN_CONTEXT, max_context), 0.95 * max_context, 4).astype(int).tolist()
    cases = []
    for i, num_sequences in enumerate(sequences):
        for j, count in enumerate(rows):
            for k, wanted in enumerate(contexts):
                is_kept = (i + j + k) % 2 == 0
                context = min(wanted, max_context - count)
                is_small = num_sequences * count <= MAX_CALL_ROWS and num_sequences * context <= MAX_CALL_TOKENS
                if is_kept and context > 0 and is_small:
                    num_logits = num_sequences if model == DRAFT else num_sequences * count
                    cases.append(Case((count,) * num_sequences, context, num_logits))
    return cases


def _prefill_grid(max_context: int) -> list[Case]:
    """Returns prompt chunks of one sequence and of four, without logits."""
    chunks = (8, 16, 32, 64, 128, 192, 256)
    cases = [
        Case((chunk,), context, 0)
        for chunk in chunks
        for context in (0, max_context // 4)
        if context + chunk <= min(max_context, MAX_CALL_ROWS + context)
    ]
    cases += [Case((chunk // 4,) * 4, 0, 0) for chunk in chunks if chunk // 4 <= max_context]
    return cases


def _random_case(model: str, max_context: int, rng: np.random.Generator) -> Case:
    """Returns a random case inside the grid. 70 % of those of the target have ragged lengths."""
    num_sequences = round(float(np.exp(rng.uniform(0.0, np.log(MAX_SEQUENCES)))))
    if model == DRAFT:
        counts = rng.integers(1, rng.choice([2, 3]), num_sequences)
    else:
        longest = min(int(rng.integers(1, 10)), MAX_CALL_ROWS // num_sequences)
        counts = rng.integers(1, longest + 1, num_sequences) if rng.random() < 0.7 else np.full(num_sequences, longest)
    longest_context = min(max_context - int(counts.max()), MAX_CALL_TOKENS // num_sequences)
    context = int(np.exp(rng.uniform(0.0, np.log(max(longest_context, 1)))))
    num_logits = num_sequences if model == DRAFT else int(counts.sum())
    return Case(tuple(counts.tolist()), context, num_logits)
