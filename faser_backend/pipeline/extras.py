"""What a request may want beside its tokens: log-probabilities, and the logits that the target gave.

Row j of a sequence's verification, or of its path through a tree, is what its j-th emitted token was drawn from; what a
stop cuts off the tokens is cut off these, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser_backend.core.errors import blaming
from faser_backend.core.frontier import Acceptance, Verification
from faser_backend.core.ports import Sampler
from faser_backend.core.request import RequestOutput
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.prefill import context_log_probs, context_logits


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """Of the n tokens that a sequence emits in a step; None where the request does not want it."""

    log_probs: list[float] | None = None  # [n]
    generation_logits: np.ndarray | None = None  # [n, V] float32
    context_logits: np.ndarray | None = None  # [num_prompt_tokens, V] float32, with the first tokens alone
    context_log_probs: np.ndarray | None = None  # of RequestOutput, likewise

    def attach(self, output: RequestOutput) -> None:
        """To an output of these tokens, or of the first ones of them."""
        num_tokens = len(output.token_ids)
        output.context_logits, output.context_log_probs = self.context_logits, self.context_log_probs
        if self.log_probs is not None:
            output.log_probs = self.log_probs[:num_tokens]
        if self.generation_logits is not None:
            output.generation_logits = self.generation_logits[:num_tokens]


def extras_of(
    sequence: Sequence, sampler: Sampler, verification: Verification, acceptance: Acceptance, index: int
) -> Extras | None:
    """What the request of sequence `index` of a batch wants, before the sequence holds the tokens that it emits. Raises
    FailedError that names the field."""
    request = sequence.request
    if not (request.wants_log_probs or request.wants_generation_logits or sequence.owes_context_logits):
        return None
    first, count = int(verification.cu_rows[index]), int(acceptance.num_emitted[index])
    if acceptance.path is None:
        logits = verification.logits[first : first + count]
    else:
        logits = verification.logits[first + acceptance.path.rows[index, :count]]
    log_probs = generated = context = context_summary = None
    if request.wants_log_probs:
        log_probs = blaming("return_log_probs", sampler.log_probs, logits, acceptance.tokens[index, :count]).tolist()
    if request.wants_generation_logits:
        generated = blaming("return_generation_logits", sampler.to_host, logits)
    if sequence.owes_context_logits and request.wants_context_log_probs:
        context_summary, sequence.context_log_probs = context_log_probs(sequence), None
    if sequence.owes_context_logits and request.wants_context_logits:
        to_host = sampler.to_host
        anchor = blaming("return_context_logits", to_host, logits[:1]) if generated is None else generated[:1]
        context = context_logits(sequence, anchor.shape[1])
        context[-1:] = anchor  # the first anchor is the prompt's last token
        sequence.context_logits = None
    return Extras(log_probs, generated, context, context_summary)
