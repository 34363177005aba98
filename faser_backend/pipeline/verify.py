"""The verify and accept phases: the target scores a frontier, acceptance decides what is emitted."""

from __future__ import annotations

import numpy as np

from faser_backend.core.plan import Acceptance, Frontier, Verification
from faser_backend.core.ports import ModelRunner, Sampler
from faser_backend.pipeline.model_call import run_model
from faser_backend.pipeline.rows import DecodeBatch, verify_rows, verify_sampling_rows
from faser_backend.pipeline.timing import PhaseTimes
from faser_backend.policy.acceptance import accept_by_rejection, accept_matches
from faser_backend.policy.randomness import PURPOSE_ACCEPT, PURPOSE_RECOVER


def verify(runner: ModelRunner, times: PhaseTimes, batch: DecodeBatch, frontier: Frontier) -> Verification:
    """Runs anchor and draft tokens of every sequence through the target in one call."""
    rows = verify_rows(batch, frontier)
    times.lap("target_rows")
    logits = run_model(runner, rows)
    times.lap("target_model")
    return Verification(logits, rows.cu_rows)


def accept(sampler: Sampler, batch: DecodeBatch, frontier: Frontier, verification: Verification) -> Acceptance:
    """Sample-and-match, or rejection sampling where the frontier carries draft probabilities."""
    cu_rows = verification.cu_rows
    rows = verify_sampling_rows(batch, frontier, cu_rows)
    if frontier.draft_probs is None:
        return accept_matches(frontier, sampler.sample(verification.logits, rows), cu_rows)
    rounds = batch.rounds[rows.sequence]
    return accept_by_rejection(
        frontier,
        sampler.probabilities(verification.logits, rows),
        cu_rows,
        sampler.uniforms(rows, PURPOSE_ACCEPT, rounds),
        sampler.uniforms(rows, PURPOSE_RECOVER, rounds),
    )


def emitted_log_probs(sampler: Sampler, verification: Verification, acceptance: Acceptance, index: int) -> np.ndarray:
    """Log-probabilities [num_emitted] of what sequence `index` of the batch emits."""
    first = int(verification.cu_rows[index])
    count = int(acceptance.num_emitted[index])
    return sampler.log_probs(verification.logits[first : first + count], acceptance.tokens[index, :count])
