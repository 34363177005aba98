"""The objects of /v1/completions and /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from faser_backend.serving.openai.answer import Answer, Piece, TokenLogProb, speculation_of
from faser_backend.serving.openai.fields import ChatBody, CompletionBody, ResponsesBody
from faser_backend.serving.openai.tools import CallFinder, ToolForm

Event = tuple[str | None, dict[str, Any]]  # name of a server-sent event, if it has one, and its data


class Reply(Protocol):
    """A request's answers as the API's objects. Streams call begin, chunk and end; others add and whole."""

    answers: list[Answer]

    def begin(self) -> list[Event]: ...
    def chunk(self, index: int, piece: Piece) -> list[Event]: ...
    def end(self) -> list[Event]: ...
    def add(self, index: int, piece: Piece) -> None: ...
    def whole(self) -> dict[str, Any]: ...


class _Choices:
    """What both kinds share."""

    kind = ""
    chunk_kind = ""
    id_prefix = ""

    def __init__(self, body: CompletionBody | ChatBody, model: str, answers: list[Answer], kv_block_size: int) -> None:
        self.body = body
        self.answers = answers
        self._kv_block_size = kv_block_size
        self._frame = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
        }

    def begin(self) -> list[Event]:
        return []

    def end(self) -> list[Event]:
        options = self.body.stream_options
        extra: dict[str, Any] = {}
        if options is not None and options.include_usage:
            extra["usage"] = self._usage()
        if self.body.spec_decode_metrics is not None:
            extra["metrics"] = self._metrics()
        return [(None, self._chunk_of([]) | extra)] if extra else []

    def _chunk_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        options, chunk = self.body.stream_options, self._frame | {"object": self.chunk_kind, "choices": choices}
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        return chunk

    def _whole_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        whole = self._frame | {"object": self.kind, "choices": choices, "usage": self._usage()}
        return whole | ({"metrics": self._metrics()} if self.body.spec_decode_metrics is not None else {})

    def _usage(self) -> dict[str, Any]:
        return usage_of(self.answers, self.body.num_choices, self._kv_block_size)

    def _metrics(self) -> dict[str, Any]:
        return metrics_of(self.body, self.answers)


class CompletionReply(_Choices):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, body: CompletionBody, model: str, answers: list[Answer], kv_block_size: int) -> None:
        super().__init__(body, model, answers, kv_block_size)
        self._texts = ["" for _ in answers]
        self._log_probs: list[list[TokenLogProb]] = [[] for _ in answers]

    def chunk(self, index: int, piece: Piece) -> list[Event]:
        if not (piece.text or piece.finish_reason or piece.log_probs):
            return []
        log_probs = self._log_probs_of(piece.log_probs) if piece.log_probs else None
        choice = _completion(index, piece.text, log_probs, piece.finish_reason)
        return [(None, self._chunk_of([_with_details(choice, self.body, piece)]))]

    def add(self, index: int, piece: Piece) -> None:
        self._texts[index] += piece.text
        self._log_probs[index] += piece.log_probs

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            wanted = self.body.logprobs is not None
            log_probs = self._log_probs_of(self._log_probs[index]) if wanted else None
            choices.append(_completion(index, self._texts[index], log_probs, answer.finish_reason, answer.stop_reason))
        return self._whole_of(choices)

    def _log_probs_of(self, log_probs: list[TokenLogProb]) -> dict[str, Any]:
        return {
            "tokens": [one.text for one in log_probs],
            "token_logprobs": [one.log_prob for one in log_probs],
            "top_logprobs": [None if one.log_prob is None else _top_of(one) for one in log_probs],
            "text_offset": [one.offset for one in log_probs],
        }


def _top_of(one: TokenLogProb) -> dict[str, float]:
    return {text: value for text, _, value in one.top}


class ChatReply(_Choices):
    """form: how this model writes calls, where the request offers tools."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    body: ChatBody

    def __init__(
        self, body: ChatBody, model: str, answers: list[Answer], kv_block_size: int, form: ToolForm | None = None
    ) -> None:
        super().__init__(body, model, answers, kv_block_size)
        self._finders = [CallFinder(form, is_single=body.parallel_tool_calls is False) for _ in answers]
        self._texts = ["" for _ in answers]
        self._log_probs: list[list[TokenLogProb]] = [[] for _ in answers]

    def begin(self) -> list[Event]:
        begun = {"role": "assistant", "content": ""}
        return [(None, self._chunk_of([_delta(index, begun)])) for index in range(len(self.answers))]

    def chunk(self, index: int, piece: Piece) -> list[Event]:
        text, calls = self._finders[index].read(piece.text, is_last=piece.finish_reason is not None)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            first = len(self._finders[index].calls) - len(calls)
            delta["tool_calls"] = [{"index": first + place, **call.as_dict()} for place, call in enumerate(calls)]
        choice = _delta(index, delta, self._finish_reason(index, piece.finish_reason))
        if piece.log_probs:
            choice["logprobs"] = {"content": list(map(_chat_log_prob, piece.log_probs))}
        if not (delta or piece.finish_reason or piece.log_probs):
            return []
        return [(None, self._chunk_of([_with_details(choice, self.body, piece)]))]

    def add(self, index: int, piece: Piece) -> None:
        self._texts[index] += self._finders[index].read(piece.text, is_last=piece.finish_reason is not None)[0]
        self._log_probs[index] += piece.log_probs

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            calls = self._finders[index].calls
            message: dict[str, Any] = {"role": "assistant", "content": self._texts[index] or (None if calls else "")}
            message |= {"refusal": None}
            if calls:
                message["tool_calls"] = [call.as_dict() for call in calls]
            log_probs = {"content": list(map(_chat_log_prob, self._log_probs[index]))} if self.body.logprobs else None
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": log_probs,
                    "finish_reason": self._finish_reason(index, answer.finish_reason),
                    "stop_reason": answer.stop_reason,
                }
            )
        return self._whole_of(choices)

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._finders[index].calls else reason


def usage_of(answers: Sequence[Answer], num_choices: int, kv_block_size: int) -> dict[str, Any]:
    """A prompt counts once, however many answers it has; cached tokens are whole blocks of the KV cache."""
    firsts = answers[::num_choices]
    prompt = sum(len(answer.wanted.prompt_ids) for answer in firsts)
    cached = sum(
        min(answer.counters.get("num_reused_blocks", 0) * kv_block_size, len(answer.wanted.prompt_ids))
        for answer in firsts
    )
    completion = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def metrics_of(body: CompletionBody | ChatBody | ResponsesBody, answers: Sequence[Answer]) -> dict[str, Any]:
    is_detailed = body.spec_decode_metrics == "detailed"
    return {"speculative_decoding": speculation_of(answers, is_detailed=is_detailed)}


def _completion(
    index: int, text: str, log_probs: dict[str, Any] | None, reason: str | None, stop_reason: str | None = None
) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": log_probs, "finish_reason": reason}
    return choice | ({"stop_reason": stop_reason} if stop_reason is not None else {})


def _delta(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _with_details(choice: dict[str, Any], body: CompletionBody | ChatBody, piece: Piece) -> dict[str, Any]:
    if body.return_token_details:
        choice["token_details"] = [{"text": text, "is_drafted": is_drafted} for text, is_drafted in piece.details]
    return choice


def _chat_log_prob(one: TokenLogProb) -> dict[str, Any]:
    return _one_log_prob(one.text, one.token_bytes, one.log_prob) | {
        "top_logprobs": [_one_log_prob(*alternative) for alternative in one.top]
    }


def _one_log_prob(text: str, token_bytes: bytes | None, value: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": None if token_bytes is None else list(token_bytes)}
