"""A `Sequence`: a request inside the engine, with its tokens and the length of each KV cache.

`slot` is the row that the sequence keeps in every persistent per-sequence array (block table,
sampler state) from admission until it leaves; steps gather rows by slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from faser_backend.core.errors import Failure, blamed
from faser_backend.core.request import Request, RequestStats


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output tokens of one request.

    A sequence is ready to decode when the target has seen every token but the last (the anchor);
    until then its missing tokens are prefilled in chunks. Preemption sets both lengths to 0.
    """

    request: Request
    token_ids: np.ndarray  # [num_prompt_tokens + max_tokens] int64, first num_tokens are valid
    num_tokens: int
    adapter: Any = None  # of RowBatch.adapters
    slot: int = -1  # -1 while waiting
    target_len: int = 0  # leading tokens whose KV is in the target's pool
    draft_len: int = 0  # leading tokens whose KV is in the draft's pool
    num_proposals: int = 0  # that the draft made for it, discarded ones included
    client_draft: tuple[int, ...] = ()  # draft tokens of the client or forced by a grammar, until verified
    context_logits: np.ndarray | None = None  # [num_prompt_tokens, V] float32, filled while the prompt is read
    failure: Failure | None = None  # of this sequence alone: the current step goes on, then ends it
    context_log_probs: np.ndarray | None = None  # see EngineOutput; filled in the same way
    stats: RequestStats = field(default_factory=RequestStats)
    digests: list[bytes] | None = None  # of its prefixes, which differ by adapter; see BlockManager.match

    @classmethod
    def from_request(cls, request: Request, arrival_ns: int, adapter: Any = None) -> Sequence:
        num_prompt = int(request.prompt_ids.size)
        token_ids = np.zeros(num_prompt + request.max_tokens, np.int64)
        token_ids[:num_prompt] = request.prompt_ids
        stats = RequestStats(arrival_ns=arrival_ns, num_prompt_tokens=num_prompt)
        # The last token that may be emitted is the one behind the draft.
        client_draft = () if request.max_draft_tokens == 0 else request.draft_ids[: request.max_tokens - 1]
        digests = [request.lora_name.encode()]
        return cls(request, token_ids, num_prompt, adapter, client_draft=client_draft, stats=stats, digests=digests)

    @property
    def num_prompt_tokens(self) -> int:
        return self.stats.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.stats.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be emitted, >= 1 while the sequence runs."""
        return self.token_ids.size - self.num_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens before the anchor that the target has not seen."""
        return self.num_tokens - 1 - self.target_len

    @property
    def is_ready(self) -> bool:
        return self.target_len == self.num_tokens - 1

    @property
    def owes_context_logits(self) -> bool:
        """Whether the prompt must be run with logits, which leave with the first output tokens."""
        wants = self.request.wants_context_logits or self.request.wants_context_log_probs
        return wants and self.num_output_tokens == 0

    def fail(self, field: str, error: Exception) -> None:
        """Marks the sequence as failed. The first of several failures counts."""
        self.failure = self.failure or blamed(field, error)

    def append(self, tokens: list[int]) -> None:
        self.token_ids[self.num_tokens : self.num_tokens + len(tokens)] = tokens
        self.num_tokens += len(tokens)

    def check_integrity(self) -> None:
        assert 1 <= self.num_tokens <= self.token_ids.size
        assert 0 <= self.target_len < self.num_tokens, "the anchor's KV is never committed"
        assert 0 <= self.draft_len < self.num_tokens
