"""The commit phase: appends accepted tokens, cuts both KV caches to them, and collects logits and log-probabilities.

The j-th emitted token of a sequence is drawn from row j of its verification. A stop that cuts off tokens cuts off their
logits and log-probabilities too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser_backend.core.errors import ErrorCode, FailedError, Failure, blaming
from faser_backend.core.frontier import MAIN, Acceptance, Frontier, Verification
from faser_backend.core.ports import NO_TOKEN, Sampler
from faser_backend.core.request import EngineOutput, FinishReason
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.prefill import context_log_probs, context_logits


class RoundCounts(NamedTuple):
    """Counts of one sequence's draft tokens in one verification."""

    num_drafted: int
    num_tested: int  # up to the first rejection
    num_accepted: int
    num_pruned: int  # rows that left at an exit
    source: int  # who made the chain (core/frontier.py)


def round_counts(frontier: Frontier, verification: Verification, acceptance: Acceptance) -> list[RoundCounts]:
    drafted, kept = frontier.num_drafted, verification.num_kept
    tested = np.minimum(acceptance.num_accepted + 1, np.minimum(drafted, kept))
    columns = (drafted, tested, acceptance.num_accepted, frontier.num_rows - kept, frontier.sources)
    return list(map(RoundCounts, *(column.tolist() for column in columns)))


def commit_tokens(sequence: Sequence, tokens: list[int], counts: RoundCounts) -> FinishReason | None:
    """Appends tokens, cut in place at the first stop, and advances both KV lengths. If the search for stop
    words fails, or a logit is unusable, raises FailedError and leaves the sequence unchanged.

    The target has run the anchor and all draft tokens; the draft model all of its chain but the last one, and no token
    of a client or n-grams. Only the KV of accepted tokens stays valid.
    """
    old = sequence.num_tokens
    finish = blaming("stop_words", _cut_at_stop, sequence, tokens)
    if tokens[-1] == NO_TOKEN:
        what = f"the model's logits for position {old + len(tokens) - 1} hold NaN or infinity: no token can be drawn"
        raise FailedError(Failure(ErrorCode.INTERNAL, what))
    sequence.append(tokens)
    sequence.target_len = min(old + counts.num_accepted, sequence.num_tokens - 1)
    if counts.num_drafted and counts.source == MAIN:
        sequence.draft_len = min(old + min(counts.num_accepted, counts.num_drafted - 1), sequence.num_tokens - 1)
    sequence.client_draft = ()  # it continued the old last token only
    stats = sequence.stats
    stats.num_drafted += counts.num_drafted
    # Tokens behind the one that ended the request do not count.
    stats.num_tested += counts.num_tested if finish is None else min(counts.num_tested, len(tokens))
    stats.num_accepted += counts.num_accepted if finish is None else min(counts.num_accepted, len(tokens))
    stats.num_pruned += counts.num_pruned
    stats.num_steps += 1
    return finish


def final_output(sequence: Sequence, reason: FinishReason, error: Failure | None = None) -> EngineOutput:
    """Returns the last output of a request that ends between its tokens."""
    return EngineOutput(sequence.request.request_id, [], finish_reason=reason, error=error, stats=sequence.stats)


def _cut_at_stop(sequence: Sequence, tokens: list[int]) -> FinishReason | None:
    """Finds the first token that ends the request, and removes the tokens behind it from `tokens`."""
    request = sequence.request
    reason: FinishReason | None = None
    num_kept = len(tokens)
    if num_kept >= sequence.num_remaining_tokens:
        num_kept = sequence.num_remaining_tokens
        reason = FinishReason.LENGTH
    for index in range(num_kept if request.end_ids or request.stop_sequences else 0):
        if tokens[index] in request.end_ids:
            num_kept, reason = index + 1, FinishReason.END_ID
            break
        if request.stop_sequences and _ends_with_stop(sequence, tokens, index + 1):
            num_kept, reason = index + 1, FinishReason.STOP_WORDS
            break
    del tokens[num_kept:]
    return reason


def _ends_with_stop(sequence: Sequence, tokens: list[int], count: int) -> bool:
    """Whether the output followed by tokens[:count] ends with a stop sequence."""
    stops = sequence.request.stop_sequences
    start = max(sequence.num_prompt_tokens, sequence.num_tokens - max(map(len, stops)))
    tail = sequence.token_ids[start : sequence.num_tokens].tolist() + tokens[:count]
    return any(tail[-len(stop) :] == list(stop) for stop in stops)


def add_extras(
    output: EngineOutput, sequence: Sequence, sampler: Sampler, verification: Verification, index: int
) -> None:
    """Adds the logits and log-probabilities that sequence `index` of a batch wants to an output of all its tokens,
    before the sequence holds them. Raises FailedError that names the field."""
    request, first = sequence.request, int(verification.cu_rows[index])
    logits = verification.logits[first : first + len(output.token_ids)]
    if request.wants_log_probs:
        drawn = np.array(output.token_ids).clip(min=0)  # NO_TOKEN fails the request later
        with np.errstate(invalid="ignore"):
            output.log_probs = blaming("return_log_probs", sampler.log_probs, logits, drawn).tolist()
    if request.wants_generation_logits:
        output.generation_logits = blaming("return_generation_logits", sampler.to_host, logits)
    if sequence.owes_context_logits and request.wants_context_log_probs:
        output.context_log_probs, sequence.context_log_probs = context_log_probs(sequence), None
    if sequence.owes_context_logits and request.wants_context_logits:
        anchor = output.generation_logits
        if anchor is None:
            anchor = blaming("return_context_logits", sampler.to_host, logits[:1])
        output.context_logits = context_logits(sequence, anchor.shape[1])
        output.context_logits[-1:] = anchor[:1]  # the first anchor is the prompt's last token
        sequence.context_logits = None
