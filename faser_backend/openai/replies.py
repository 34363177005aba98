"""The objects of /v1/completions and /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from faser_backend.openai.answer import Answer, Piece, speculation_of
from faser_backend.openai.fields import Body, ChatBody, CompletionBody
from faser_backend.openai.tools import CallFinder, FunctionCall, ToolForm
from faser_backend.text.answer_stream import AnswerToken
from faser_backend.text.tokenizer import TextTokenizer

Event = tuple[str | None, dict[str, Any]]  # name of a server-sent event, if it has one, and its data


class ApiReply:
    """A request's answers as the API's objects. Every piece goes through `chunk`, whose events a stream sends; who does
    not stream takes `whole` in the end."""

    has_done = True  # whether a stream ends with the line [DONE]

    def __init__(self, body: Body, answers: Sequence[Answer]) -> None:
        self.body = body
        self.answers = answers

    def begin(self) -> list[Event]:
        return []

    def chunk(self, index: int, piece: Piece) -> list[Event]:
        raise NotImplementedError

    def end(self) -> list[Event]:
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many answers it has; cached tokens are whole blocks of the KV cache."""
        firsts = self.answers[:: self.body.num_choices]
        prompt = sum(answer.num_prompt_tokens for answer in firsts)
        block_size = self.answers[0].model.kv_block_size
        cached = (min(answer.stats.num_reused_blocks * block_size, answer.num_prompt_tokens) for answer in firsts)
        completion = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
        }

    @property
    def metrics(self) -> dict[str, Any]:
        """Acceptance of the request's drafts, as a part of the API's objects; empty unless asked for."""
        wanted = self.body.spec_decode_metrics
        if wanted is None:
            return {}
        return {"metrics": {"speculative_decoding": speculation_of(self.answers, is_detailed=wanted == "detailed")}}


class ChoicesReply(ApiReply):
    """Parts that completions and chats share: a list of choices, each a text with its log-probabilities."""

    kinds = ("", "")  # whole, and of a chunk
    id_prefix = ""

    def __init__(self, body: Body, answers: Sequence[Answer]) -> None:
        super().__init__(body, answers)
        self._frame = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": answers[0].model.name,
        }
        self._texts = ["" for _ in answers]
        self._tokens: list[list[AnswerToken]] = [[] for _ in answers]

    def end(self) -> list[Event]:
        options = self.body.stream_options
        extra = {"usage": self.usage} if options is not None and options.include_usage else {}
        extra |= self.metrics
        return [(None, self._chunk_of([]) | extra)] if extra else []

    def whole(self) -> dict[str, Any]:
        choices = list(map(self._choice, range(len(self.answers))))
        return self._frame | {"object": self.kinds[0], "choices": choices, "usage": self.usage} | self.metrics

    def _choice(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        options, chunk = self.body.stream_options, self._frame | {"object": self.kinds[1], "choices": choices}
        return chunk | ({"usage": self.usage} if options is not None and options.continuous_usage_stats else {})

    def _event(self, choice: dict[str, Any], piece: Piece) -> list[Event]:
        if self.body.return_token_details:
            choice["token_details"] = [part._asdict() for part in piece.parts]
        return [(None, self._chunk_of([choice]))]


class CompletionReply(ChoicesReply):
    kinds = ("text_completion", "text_completion")
    id_prefix = "cmpl"
    body: CompletionBody

    def chunk(self, index: int, piece: Piece) -> list[Event]:
        tokens = piece.tokens if self.body.logprobs is not None else []
        log_probs = self._log_probs(tokens, len(self._texts[index])) if tokens else None
        self._texts[index] += piece.text
        self._tokens[index] += tokens
        if not (piece.text or piece.finish_reason or tokens):
            return []
        choice = {"index": index, "text": piece.text, "logprobs": log_probs, "finish_reason": piece.finish_reason}
        return self._event(choice, piece)

    def _choice(self, index: int) -> dict[str, Any]:
        answer, wants_log_probs = self.answers[index], self.body.logprobs is not None
        choice = {
            "index": index,
            "text": self._texts[index],
            "logprobs": self._log_probs(self._tokens[index], 0) if wants_log_probs else None,
            "finish_reason": answer.finish_reason,
        }
        return choice | ({"stop_reason": answer.stop_reason} if answer.stop_reason is not None else {})

    def _log_probs(self, tokens: list[AnswerToken], offset: int) -> dict[str, Any]:
        """offset: characters of the choice's text before the tokens'."""
        tokenizer = self.answers[0].model.tokenizer
        tops = [{named(tokenizer, one)[0]: value for one, value in token.top} for token in tokens]
        return {
            "tokens": [named(tokenizer, token.token_id)[0] for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [None if token.log_prob is None else top for token, top in zip(tokens, tops, strict=True)],
            "text_offset": list(accumulate((len(token.text) for token in tokens), initial=offset))[:-1],
        }


class ChatReply(ChoicesReply):
    kinds = ("chat.completion", "chat.completion.chunk")
    id_prefix = "chatcmpl"
    body: ChatBody

    def __init__(self, body: ChatBody, answers: Sequence[Answer], form: type[ToolForm] | None) -> None:
        """form: how this model writes calls, where the request offers tools."""
        super().__init__(body, answers)
        self._finders = [CallFinder(form, is_single=body.parallel_tool_calls is False) for _ in answers]

    def begin(self) -> list[Event]:
        begun = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [(None, self._chunk_of([{"index": index, **begun}])) for index in range(len(self.answers))]

    def chunk(self, index: int, piece: Piece) -> list[Event]:
        text, calls = self._finders[index].read(piece.text, is_last=piece.finish_reason is not None)
        tokens = piece.tokens if self.body.logprobs else []
        self._texts[index] += text
        self._tokens[index] += tokens
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            first = len(self._finders[index].calls) - len(calls)
            delta["tool_calls"] = [{"index": first + place, **call.as_dict()} for place, call in enumerate(calls)]
        if not (delta or piece.finish_reason or tokens):
            return []
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._log_probs(tokens) if tokens else None,
            "finish_reason": self._finish_reason(index, piece.finish_reason),
        }
        return self._event(choice, piece)

    def _choice(self, index: int) -> dict[str, Any]:
        calls: list[FunctionCall] = self._finders[index].calls
        content = self._texts[index] or (None if calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [call.as_dict() for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._log_probs(self._tokens[index]) if self.body.logprobs else None,
            "finish_reason": self._finish_reason(index, self.answers[index].finish_reason),
            "stop_reason": self.answers[index].stop_reason,
        }

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._finders[index].calls else reason

    def _log_probs(self, tokens: list[AnswerToken]) -> dict[str, Any]:
        return {
            "content": [
                self._log_prob(token.token_id, token.log_prob)
                | {"top_logprobs": [self._log_prob(*one) for one in token.top]}
                for token in tokens
            ]
        }

    def _log_prob(self, token_id: int, value: float | None) -> dict[str, Any]:
        text, token_bytes = named(self.answers[0].model.tokenizer, token_id)
        return {"token": text, "logprob": value, "bytes": list(token_bytes)}


def named(tokenizer: TextTokenizer, token_id: int) -> tuple[str, bytes]:
    """A token's text and bytes. One that is part of a character is called by its bytes: every token has a name."""
    table = tokenizer.token_bytes
    if table is None or not table[token_id]:  # without a table, or special
        text = tokenizer.decode([token_id], skips_special_tokens=False)
        return text, text.encode()
    try:
        return table[token_id].decode(), table[token_id]
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in table[token_id]), table[token_id]
