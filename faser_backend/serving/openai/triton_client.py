"""Token ids from Triton's model `tensorrt_llm`, over gRPC: one stream per sequence, which a caller can end at any time.

A stream of its own per request, because Triton tells a model that its client went away by the end of that stream.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from faser_backend.core.errors import ErrorCode, Failure
from faser_backend.serving.openai.errors import ApiError
from faser_backend.serving.openai.sampling import Generation, dense_bias
from faser_backend.serving.tensors import JSON_ERRORS

MODEL = "tensorrt_llm"
# Of errors that are gRPC's own; any other is INTERNAL.
_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID,
    grpc.StatusCode.UNAVAILABLE: ErrorCode.UNAVAILABLE,
    grpc.StatusCode.NOT_FOUND: ErrorCode.UNAVAILABLE,  # the model is being unloaded or replaced
    grpc.StatusCode.CANCELLED: ErrorCode.UNAVAILABLE,  # by Triton, which ends
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.UNAVAILABLE,
}
_DTYPES: dict[str, type] = {
    "runtime_top_k": np.int32,
    "min_tokens": np.int32,
    "num_draft_tokens": np.int32,
    "seed": np.uint64,
}
_COUNTERS = {
    "total_draft_tokens": "num_drafted",
    "total_accepted_draft_tokens": "num_accepted",
    "total_verification_steps": "num_steps",
    "kv_cache_reused_blocks": "num_reused_blocks",
    "arrival_time_ns": "arrival_ns",
    "first_scheduled_time_ns": "scheduled_ns",
    "first_token_time_ns": "first_token_ns",
    "last_token_time_ns": "last_token_ns",
}


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one response brought. is_drafted [n]: which tokens were drafted and accepted; log_probs [n] and logits
    [n, V], as the target gave them, where they were asked for; counters: of the whole sequence so far.
    prompt_log_probs [num_prompt_tokens - 1, 6], prompt_top_ids [.., 5]: of every token of the prompt but the first, and
    of the best in its place, once, where they were asked for."""

    ids: list[int]
    is_drafted: list[bool]
    log_probs: list[float] | None
    logits: np.ndarray | None
    counters: dict[str, int]
    prompt_log_probs: np.ndarray | None = None
    prompt_top_ids: np.ndarray | None = None


class TokenClient:
    """One connection to Triton, shared by all requests. Belongs to one event loop."""

    def __init__(self, url: str, vocab_size: int) -> None:
        """url: HOST:PORT of Triton's gRPC endpoint."""
        self._client = triton.InferenceServerClient(url)
        self._vocab_size = vocab_size
        self._headers: dict[str, str] = {}

    def carrying(self, headers: dict[str, str]) -> TokenClient:
        """The same connection, for a request with these headers of its client's trace."""
        carrier = copy.copy(self)
        carrier._headers = headers
        return carrier

    async def is_ready(self) -> bool:
        try:
            return bool(await self._client.is_model_ready(MODEL, client_timeout=2.0))
        except InferenceServerException:
            return False

    async def generate(self, wanted: Generation) -> AsyncGenerator[Tokens, None]:
        """Yields what comes, until the sequence ends. Closing the iterator cancels the request in the engine.

        The client's trace headers go along. Raises ApiError.
        """
        is_ended = False
        call: Any = self._client.stream_infer(_only(self._request(wanted)), headers=self._headers or None)
        try:
            async for result, error in call:
                if error is not None:
                    raise ApiError.of(_failure_of(error.message()))
                yield _tokens_of(result)
            is_ended = True
        except grpc.aio.AioRpcError as error:
            code = _CODES.get(error.code(), ErrorCode.INTERNAL)
            raise ApiError.of(Failure(code, f"Triton does not answer ({error.code().name})")) from None
        finally:
            if not is_ended:
                call.cancel()

    async def close(self) -> None:
        await self._client.close()

    def _request(self, wanted: Generation) -> dict[str, Any]:
        outputs = ["output_ids", "draft_token_mask", *_COUNTERS]
        outputs += ["output_log_probs"] if wanted.num_top is not None else []
        outputs += ["generation_logits"] if wanted.num_top else []
        if wanted.num_top is not None and wanted.echoes:
            outputs += ["context_log_probs", "context_top_ids"]
        return {
            "model_name": MODEL,
            "inputs": [_tensor(name, array) for name, array in _arrays(wanted, self._vocab_size).items()],
            "outputs": [triton.InferRequestedOutput(name) for name in outputs],
            "parameters": {JSON_ERRORS: True},
        }


async def _only(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """A stream of one request: with its last response Triton ends the stream."""
    yield request


def _arrays(wanted: Generation, vocab_size: int) -> dict[str, np.ndarray]:
    """The request's tensors, each [1, n]."""
    arrays = {
        "input_ids": np.array([wanted.prompt_ids], np.int32),
        "input_lengths": np.array([[len(wanted.prompt_ids)]], np.int32),
        "request_output_len": np.array([[max(1, wanted.max_tokens)]], np.int32),
        "streaming": np.array([[True]]),
        "exclude_input_in_output": np.array([[True]]),
        "return_perf_metrics": np.array([[True]]),
        "seed": np.array([[wanted.seed]], np.uint64),
    }
    for name, value in wanted.scalars.items():
        arrays[name] = np.array([[value]], _DTYPES.get(name, np.float32))
    if wanted.num_top is not None:
        arrays["return_log_probs"] = np.array([[True]])
        arrays["return_context_log_probs"] = np.array([[wanted.echoes]])
        if wanted.num_top:
            arrays["return_generation_logits"] = np.array([[True]])
    if wanted.ignores_end:
        arrays["end_id"] = np.array([[-1]], np.int32)
    if wanted.logit_bias:
        arrays["embedding_bias"] = dense_bias(wanted.logit_bias, vocab_size)[None]
    if wanted.draft_ids:
        arrays["draft_input_ids"] = np.array([wanted.draft_ids], np.int32)
    if wanted.guide is not None:
        arrays["guided_decoding_guide_type"] = np.array([[wanted.guide.kind.encode()]], object)
        arrays["guided_decoding_guide"] = np.array([[wanted.guide.text.encode()]], object)
    return arrays


def _tensor(name: str, array: np.ndarray) -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def _tokens_of(result: Any) -> Tokens:
    ids = result.as_numpy("output_ids")
    if ids is None or ids.size == 0:
        return Tokens([], [], None, None, _counters_of(result))
    mask, log_probs, logits = map(result.as_numpy, ("draft_token_mask", "output_log_probs", "generation_logits"))
    prompt, prompt_top = map(result.as_numpy, ("context_log_probs", "context_top_ids"))
    return Tokens(
        ids=ids[0, 0].tolist(),
        is_drafted=mask[0, 0].tolist(),
        log_probs=None if log_probs is None else log_probs[0, 0].tolist(),
        logits=None if logits is None else logits[0, 0],
        counters=_counters_of(result),
        prompt_log_probs=None if prompt is None else prompt[0],
        prompt_top_ids=None if prompt_top is None else prompt_top[0],
    )


def _counters_of(result: Any) -> dict[str, int]:
    found = {field: result.as_numpy(name) for name, field in _COUNTERS.items()}
    return {field: int(array[0, 0]) for field, array in found.items() if array is not None and array.size}


def _failure_of(text: str) -> Failure:
    """The model's failure. What it did not write is Triton's own, which has no code in a stream: Triton refused the
    request, because the model loads, stops or is replaced, or the model's process is gone.

    Triton's header `triton_grpc_error` would end the stream with a code, but the server crashes where a client leaves
    beside such an error.
    """
    return Failure.from_json(text) or Failure(ErrorCode.UNAVAILABLE, f"Triton: {text}")
