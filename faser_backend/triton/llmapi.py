"""Speaks the `llmapi` contract: one text model without a batch dimension, as TensorRT-LLM's LLM API serves it.

Translates names and shapes to and from the inflight batcher's contract, which checks the values. Two meanings differ:
a temperature alone turns sampling on, and streamed responses carry all text so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from faser_backend.core.errors import ErrorCode, Failure, RequestError
from faser_backend.core.request import FinishReason, RequestStats
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.contract import ParsedRequest, parse_requests, read_scalar, refuse_unsupported
from faser_backend.triton.frontend import InflightBatcherContract, Responder
from faser_backend.triton.link import Handshake
from faser_backend.triton.tensor_io import NamedArray, Reply
from faser_backend.triton.tensors import Tensors

DEFAULT_MAX_TOKENS = 32
_PREFIX = "sampling_param_"  # of inputs that have our names otherwise
_INPUTS = {  # theirs -> ours, where they differ
    "sampling_param_stop": "stop_words",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
    "return_cumulative_logprob": "return_log_probs",
}
_OUTPUTS = {"cum_log_probs": "cumulative_logprob"}  # ours -> theirs, where they differ
_FLAGGED = {"finish_reason": "return_finish_reason", "stop_reason": "return_stop_reason"}
_NO_REASON = "None"  # Python's None as a string, which clients of the LLM API compare with


class LlmApiContract(InflightBatcherContract):
    """The llmapi contract. A stop request is answered with the error CANCELLED."""

    missing_stop_id = "A request id must be provided for request cancellation"

    def parse(
        self, tensors: Tensors, request_id: str, handshake: Handshake, *, is_decoupled: bool
    ) -> list[ParsedRequest]:
        """Returns the request. By default its answer lacks the prompt and the stop string. Raises RequestError."""
        refuse_unsupported(tensors)
        prompts = tensors.get("text_input")
        if prompts is not None and prompts.size > 1:
            raise RequestError("text_input", list(prompts.shape), "one prompt per request: must hold exactly 1 value")
        sent = {_INPUTS.get(name, name.removeprefix(_PREFIX)): name for name in tensors}  # ours -> theirs
        ours = {name: tensors[theirs] for name, theirs in sent.items()}
        ours.setdefault("exclude_input_in_output", np.array([True]))
        ours.setdefault("max_tokens", np.array([DEFAULT_MAX_TOKENS], np.int32))
        try:
            (parsed,) = parse_requests(ours, request_id, handshake, is_decoupled=is_decoupled, is_llm_api=True)
        except RequestError as error:
            if (theirs := sent.get(error.field or "", "")) not in ("", error.field):
                error.blame(theirs)
            raise
        flags = frozenset(name for name, flag in _FLAGGED.items() if read_scalar(tensors, flag, default=False))
        return [replace(parsed, includes_stop=False, accumulates_text=True, extra_outputs=flags)]

    def reply(self, parsed: ParsedRequest, requested: Iterable[str], tokenizer: TextTokenizer) -> LlmApiReply:
        return LlmApiReply(parsed, frozenset(requested), tokenizer)

    def acknowledge_stop(self, responder: Responder) -> None:
        responder.fail(Failure(ErrorCode.CANCELLED, "Request cancelled by client"))


class LlmApiReply(Reply):
    """A reply under the llmapi contract's names, without the batch dimension."""

    def __init__(self, parsed: ParsedRequest, theirs: frozenset[str], tokenizer: TextTokenizer) -> None:
        self._theirs = theirs
        names = {theirs: ours for ours, theirs in _OUTPUTS.items()}
        ours = {names.get(name, name) for name in theirs}
        super().__init__(parsed, ours if parsed.request.wants_log_probs else ours - {"cum_log_probs"}, tokenizer)

    def render(self) -> list[NamedArray]:
        arrays = [(_OUTPUTS.get(name, name), array.reshape(-1)) for name, array in super().render()]
        for name in sorted(self.parsed.extra_outputs & self._theirs):
            arrays.append((name, np.array([self._reason(name).encode()], dtype=object)))
        if self.parsed.request.wants_stats and self.stream.stats is not None:
            arrays += [each for each in self._cache_use(self.stream.stats) if each[0] in self._theirs]
        return arrays

    def _cache_use(self, stats: RequestStats) -> list[NamedArray]:
        """Returns the numbers of prompt blocks that the cache held and that it lacked, and their rate."""
        num_missed = max(0, self.parsed.num_prompt_blocks - stats.num_reused_blocks)
        num_looked_up = stats.num_reused_blocks + num_missed
        return [
            ("kv_cache_reused_block", np.array([stats.num_reused_blocks], np.int32)),
            ("kv_cache_missed_block", np.array([num_missed], np.int32)),
            ("kv_cache_hit_rate", np.array([stats.num_reused_blocks / max(1, num_looked_up)], np.float32)),
        ]

    def _reason(self, name: str) -> str:
        if name == "stop_reason":
            return self.stream.matched_stop or _NO_REASON
        finish = self.stream.finish_reason
        if finish is FinishReason.STOPPED and not self.stream.is_stopped:
            return "cancelled"
        return (finish and self.stream.reason) or _NO_REASON
