"""The client of another Triton's model `tensorrt_llm`, over gRPC: one stream per sequence, which the caller can end.

Every sequence has its own stream because Triton reports a client that left by the end of its stream.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from faser_backend.core.errors import ErrorCode, Failure
from faser_backend.core.request import EngineOutput, FinishReason, RequestStats
from faser_backend.openai.errors import ApiError
from faser_backend.openai.requests import Generation
from faser_backend.triton.link import Handshake
from faser_backend.triton.tensors import JSON_ERRORS

MODEL = "tensorrt_llm"
_FLOATS = ("temperature", "runtime_top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# Tensors of fields of Sampling; the field of runtime_NAME is NAME.
_SAMPLING = {**dict.fromkeys(_FLOATS, np.float32), "runtime_top_k": np.int32, "min_tokens": np.int32, "seed": np.uint64}
_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID,
    grpc.StatusCode.INTERNAL: ErrorCode.INTERNAL,
    grpc.StatusCode.UNKNOWN: ErrorCode.INTERNAL,
}
_STATS = {
    "total_draft_tokens": "num_drafted",
    "total_accepted_draft_tokens": "num_accepted",
    "total_verification_steps": "num_steps",
    "kv_cache_reused_blocks": "num_reused_blocks",
}


class TokenClient:
    """One connection to Triton, shared by all requests. Belongs to one event loop."""

    handshake: Handshake | None = None  # Triton has none

    def __init__(self, url: str, vocab_size: int) -> None:
        """url: HOST:PORT of Triton's gRPC endpoint."""
        self._client = triton.InferenceServerClient(url)
        self._vocab_size = vocab_size

    async def is_ready(self) -> bool:
        try:
            return bool(await self._client.is_model_ready(MODEL, client_timeout=2.0))
        except InferenceServerException:
            return False

    async def generate(
        self, wanted: Generation, headers: dict[str, str]
    ) -> AsyncGenerator[tuple[EngineOutput, list[bool]], None]:
        """Yields outputs, each with a flag per token: drafted and accepted. One of the outputs has a finish reason.

        headers: of the client's trace. Closing the iterator cancels the request in the engine. Raises ApiError.
        """
        request, num_tokens, has_finished, is_ended = wanted.request, 0, False, False
        call: Any = self._client.stream_infer(_only(self._request(wanted)), headers=headers or None)
        try:
            async for result, error in call:
                if error is not None:
                    raise ApiError.of(_failure_of(error.message()))
                output, is_drafted = _output_of(result)
                num_tokens += len(output.token_ids)
                if output.token_ids and output.token_ids[-1] in request.end_ids:  # no tensor has the reason
                    output.finish_reason = FinishReason.END_ID
                elif output.token_ids and num_tokens == request.max_tokens:
                    output.finish_reason = FinishReason.LENGTH
                has_finished |= output.is_final
                yield output, is_drafted
            is_ended = True
            if not has_finished:  # the engine ended the sequence early, for instance after a stop request
                yield EngineOutput("", [], finish_reason=FinishReason.STOPPED), []
        except grpc.aio.AioRpcError as error:
            code = _CODES.get(error.code(), ErrorCode.UNAVAILABLE)  # it is stopping, or replaces the model
            raise ApiError.of(Failure(code, f"Triton does not answer ({error.code().name})")) from None
        finally:
            if not is_ended:
                call.cancel()

    async def close(self) -> None:
        await self._client.close()

    def _request(self, wanted: Generation) -> dict[str, Any]:
        request = wanted.request
        asked = {
            "output_log_probs": request.wants_log_probs,
            "generation_logits": request.wants_generation_logits,
            "context_log_probs": request.wants_context_log_probs,
            "context_top_ids": request.wants_context_log_probs,
        }
        outputs = ["output_ids", "draft_token_mask", *_STATS, *(name for name, is_asked in asked.items() if is_asked)]
        return {
            "model_name": MODEL,
            "inputs": [_tensor(name, array) for name, array in _arrays(wanted, self._vocab_size).items()],
            "outputs": [triton.InferRequestedOutput(name) for name in outputs],
            "parameters": {JSON_ERRORS: True},
        }


async def _only(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yields the one request of a stream; Triton ends the stream with the last response."""
    yield request


def _arrays(wanted: Generation, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns the request's tensors, each [1, n]."""
    request, sampling = wanted.request, wanted.request.sampling
    ids = request.prompt_ids.astype(np.int32)[None]
    arrays: dict[str, np.ndarray] = {"input_ids": ids, "input_lengths": np.array([[ids.size]], np.int32)}
    arrays["request_output_len"] = np.array([[request.max_tokens]], np.int32)
    flags = {
        "streaming": True,
        "exclude_input_in_output": True,
        "return_perf_metrics": True,
        "return_log_probs": request.wants_log_probs,
        "return_context_log_probs": request.wants_context_log_probs,
        "return_generation_logits": request.wants_generation_logits,
    }
    arrays |= {name: np.array([[True]]) for name, is_set in flags.items() if is_set}
    for name, dtype in _SAMPLING.items():
        arrays[name] = np.array([[getattr(sampling, name.removeprefix("runtime_"))]], dtype)
    if request.max_draft_tokens is not None:
        arrays["num_draft_tokens"] = np.array([[request.max_draft_tokens]], np.int32)
    if not request.end_ids:
        arrays["end_id"] = np.array([[-1]], np.int32)
    if sampling.logit_bias:
        arrays["embedding_bias"] = np.zeros((1, vocab_size), np.float32)
        arrays["embedding_bias"][0, list(sampling.logit_bias)] = list(sampling.logit_bias.values())
    if request.draft_ids:
        arrays["draft_input_ids"] = np.array([request.draft_ids], np.int32)
    if wanted.guide is not None:
        arrays["guided_decoding_guide_type"] = np.array([[wanted.guide.kind.encode()]], object)
        arrays["guided_decoding_guide"] = np.array([[wanted.guide.text.encode()]], object)
    return arrays


def _tensor(name: str, array: np.ndarray) -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def _output_of(result: Any) -> tuple[EngineOutput, list[bool]]:
    names = ("output_log_probs", "generation_logits", "context_log_probs", "context_top_ids")
    log_probs, logits, context, context_ids = map(result.as_numpy, names)
    ids, is_drafted = (
        [] if array is None or not array.size else array[0, 0].tolist()
        for array in map(result.as_numpy, ("output_ids", "draft_token_mask"))
    )
    stats = {field: result.as_numpy(name) for name, field in _STATS.items()}
    given = {field: int(array[0, 0]) for field, array in stats.items() if array is not None and array.size}
    if context is not None and context_ids is not None:  # in this order: own value, ids, their values
        context = np.concatenate([context[0, :, :1], context_ids[0], context[0, :, 1:]], axis=1)
    output = EngineOutput(
        "",
        ids,
        None if log_probs is None else log_probs[0, 0].tolist(),
        stats=RequestStats(**given) if given else None,
        context_log_probs=context,
        generation_logits=None if logits is None or not ids else logits[0, 0],
    )
    return output, is_drafted


def _failure_of(text: str) -> Failure:
    """Reads the model's failure. Any other text is Triton's own and means that the model is not available."""
    # The header `triton_grpc_error` would add a code, but crashes the server if a client leaves at the same time.
    return Failure.from_json(text) or Failure(ErrorCode.UNAVAILABLE, f"Triton: {text}")
