"""The commit phase: accepted tokens enter their sequence, both KV caches are cut to what is true."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser_backend.core.errors import Failure, blaming
from faser_backend.core.frontier import Acceptance, Frontier, Verification
from faser_backend.core.request import FinishReason, Request, RequestOutput
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.accepted_cells import num_run_by_draft


class RoundCounts(NamedTuple):
    """What became of one sequence's draft tokens in one verification."""

    num_drafted: int
    num_tested: int  # up to the first rejection
    num_accepted: int
    num_pruned: int  # rows that left at an exit
    num_run: int  # of the accepted ones, those up to which the draft holds keys and values
    is_client: bool  # the client's own guess
    is_look_up: bool  # n-grams made the chain


def round_counts(frontier: Frontier, verification: Verification, acceptance: Acceptance) -> list[RoundCounts]:
    """One per sequence."""
    drafted, kept = frontier.num_drafted, verification.num_kept
    tested = np.minimum(acceptance.num_accepted + 1, np.minimum(drafted, kept))
    run = np.minimum(acceptance.num_accepted, np.maximum(drafted - 1, 0))  # all of a chain but its last
    if acceptance.path is not None:
        tested, run = acceptance.path.num_tested, num_run_by_draft(frontier, acceptance)
    is_client = np.zeros(drafted.shape, np.bool_) if frontier.is_client is None else frontier.is_client
    columns = (drafted, tested, acceptance.num_accepted, frontier.num_rows - kept, run, is_client, frontier.is_look_up)
    return list(map(RoundCounts, *(column.tolist() for column in columns)))


def commit_tokens(sequence: Sequence, tokens: list[int], counts: RoundCounts) -> FinishReason | None:
    """Appends tokens (cut in place at the first stop) and advances both KV lengths. Raises, with the sequence as it
    was, what looking for stop words meets.

    The target has run the anchor and all drafts, the draft all drafts but its last one (of a tree some), and nothing
    of what a client guessed or n-grams made; of these only the rows of accepted tokens are true, and lie where their
    positions are.
    """
    old = sequence.num_tokens
    finish = blaming("stop_words", _cut_at_stop, sequence, tokens)
    sequence.append(tokens)
    sequence.target_len = min(old + counts.num_accepted, sequence.num_tokens - 1)
    if counts.is_client:
        sequence.num_client_tested += counts.num_tested
        sequence.num_client_accepted += counts.num_accepted
    elif counts.num_drafted and not counts.is_look_up:
        sequence.draft_len = min(old + counts.num_run, sequence.num_tokens - 1)
    sequence.client_draft = ()  # guesses of what came behind the last token, and of nothing later
    stats = sequence.stats
    stats.num_drafted += counts.num_drafted
    # What lies behind the token that ended the request was never asked for.
    stats.num_tested += counts.num_tested if finish is None else min(counts.num_tested, len(tokens))
    stats.num_accepted += counts.num_accepted if finish is None else min(counts.num_accepted, len(tokens))
    stats.num_pruned += counts.num_pruned
    stats.num_steps += 1
    return finish


def final_output(
    sequence: Sequence, reason: FinishReason, tokens: list[int] | None = None, error: Failure | None = None
) -> RequestOutput:
    return RequestOutput(
        sequence.request.request_id, tokens or [], finish_reason=reason, error=error, stats=sequence.stats
    )


def _cut_at_stop(sequence: Sequence, tokens: list[int]) -> FinishReason | None:
    """Finds the first token that ends the request, and drops what follows it from `tokens`."""
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
    request: Request = sequence.request
    longest = max(map(len, request.stop_sequences))
    start = max(sequence.num_prompt_tokens, sequence.num_tokens - longest)
    tail = sequence.token_ids[start : sequence.num_tokens].tolist() + tokens[:count]
    return any(tail[-len(stop) :] == list(stop) for stop in request.stop_sequences)
