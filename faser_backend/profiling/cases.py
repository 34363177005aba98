"""Calls that a profile measures: a grid that the fit sees, and random held-out calls that it never sees.

The shapes are those that serving makes: verifications of equal and of ragged lengths, draft calls, prompt
chunks without logits. Knows nothing of runners or time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.policy.cost_model import DRAFT

MAX_SEQUENCES = 32
NUM_RANDOM = 24  # fitted ones beside the grid, and as many that are held out
MIN_CASES = 24  # of a model, the held-out ones included, or a fit means little
MAX_CALL_ROWS = 256  # a prompt chunk of max_prefill_tokens, or 32 verifications of 7 drafted tokens


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Sequence b feeds counts[b] rows after `context` tokens."""

    counts: tuple[int, ...]
    context: int
    num_logit_rows: int
    is_held_out: bool = False

    @property
    def num_rows(self) -> int:
        return sum(self.counts)

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sequence, the call's own rows included."""
        return self.context + max(self.counts)


def choose_cases(model: str, max_context: int, rng: np.random.Generator, share: float = 1.0) -> list[Case]:
    """The cases of a model, each of them within max_context, in no order that matters.

    share: of the fitted ones and of those that are held out; MIN_CASES of both in any case.
    """
    fitted = _uniform_grid(model, max_context) + _prefill_grid(max_context)
    fitted += [_random_case(model, max_context, rng, is_held_out=False) for _ in range(NUM_RANDOM)]
    seen, held_out = set(fitted), []
    while len(held_out) < NUM_RANDOM:
        case = _random_case(model, max_context, rng, is_held_out=True)
        if replace(case, is_held_out=False) not in seen:
            held_out.append(case)
    share = max(share, min(MIN_CASES / (len(fitted) + len(held_out)), 1.0))
    parts = ((cases, max(round(share * len(cases)), 1)) for cases in (fitted, held_out))
    # Evenly along the grid, so that its ends are measured: beyond them a fit would guess.
    return [cases[i] for cases, count in parts for i in np.linspace(0, len(cases) - 1, count).round().astype(int)]


def make_batch(
    case: Case, vocab_size: int, block_size: int, num_blocks: int, rng: np.random.Generator, *, room: int = 0
) -> RowBatch:
    """The case as a batch, with blocks for `room` more tokens of each sequence.

    The blocks of a sequence are one run, as a prompt gets them from a pool in use: on scattered blocks 32 sequences
    of 200 tokens took 1.23 times as long. Blocks repeat where the pool is smaller than the case: what is read is
    then wrong, its cost is not.
    """
    counts = np.array(case.counts, np.int64)
    cu_rows = np.concatenate([[0], np.cumsum(counts)])
    blocks_each = -(-(case.num_tokens + room) // block_size)
    num_needed = counts.size * blocks_each
    runs = np.resize(np.arange(num_blocks), num_needed).reshape(counts.size, blocks_each)
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
    """Equal rows per sequence; every other context of each (sequences, rows), as on a chessboard."""
    rows = (1, 2, 4) if model == DRAFT else (1, 2, 3, 5, 9)
    sequences = (1, 2, 4, 8, 16, MAX_SEQUENCES)
    contexts = [int(max_context * share) for share in (0.05, 0.25, 0.5, 0.95)]
    cases = []
    for i, num_sequences in enumerate(sequences):
        for j, count in enumerate(rows):
            for k, wanted in enumerate(contexts):
                is_kept = (i + j + k) % 2 == 0
                context = min(wanted, max_context - count)
                if is_kept and context > 0 and num_sequences * count <= MAX_CALL_ROWS:
                    num_logits = num_sequences if model == DRAFT else num_sequences * count
                    cases.append(Case((count,) * num_sequences, context, num_logits))
    return cases


def _prefill_grid(max_context: int) -> list[Case]:
    """Chunks of one prompt and of several, without logits."""
    chunks = (8, 16, 32, 64, 128, 192, 256)
    cases = [
        Case((chunk,), context, 0)
        for chunk in chunks
        for context in (0, max_context // 4)
        if context + chunk <= min(max_context, MAX_CALL_ROWS + context)
    ]
    cases += [Case((chunk // 4,) * 4, 0, 0) for chunk in chunks if chunk // 4 <= max_context]
    return cases


def _random_case(model: str, max_context: int, rng: np.random.Generator, *, is_held_out: bool) -> Case:
    """A call from inside the grid: batch sizes and contexts between its ends, lengths mostly ragged."""
    num_sequences = round(float(np.exp(rng.uniform(0.0, np.log(MAX_SEQUENCES)))))
    if model == DRAFT:
        counts = rng.integers(1, rng.choice([2, 3]), num_sequences)
    else:
        longest = min(int(rng.integers(1, 10)), MAX_CALL_ROWS // num_sequences)
        counts = rng.integers(1, longest + 1, num_sequences) if rng.random() < 0.7 else np.full(num_sequences, longest)
    context = int(rng.uniform(0.05, 0.95) * max_context)
    context = max(min(context, max_context - int(counts.max())), 0)
    num_logits = num_sequences if model == DRAFT else int(counts.sum())
    return Case(tuple(counts.tolist()), context, num_logits, is_held_out)
