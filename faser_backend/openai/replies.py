"""The replies of the API: a choice grows from the engine's outputs, and every reply shapes its choices as JSON objects.

`ApiReply.add` turns each output into the events of a stream; `whole` returns the object for a client that does not
stream. app.py sends both.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from faser_backend.core.request import NUM_CONTEXT_TOP, EngineOutput, FinishReason, RequestStats
from faser_backend.openai.bodies import Body, ChatBody, CompletionBody, ResponsesBody, Tool
from faser_backend.openai.errors import ApiError
from faser_backend.openai.requests import Generation
from faser_backend.openai.tools import CallFinder, FunctionCall
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.answer_stream import AnswerPart, AnswerStream, AnswerToken
from faser_backend.text.tokenizer import TextTokenizer

Event = tuple[str | None, dict[str, Any]]  # the name of a server-sent event, if it has one, and its data


class Answer:
    """One choice: its text so far, its counts, and the acceptance of its drafts."""

    def __init__(self, wanted: Generation, tokenizer: TextTokenizer) -> None:
        self.wanted, self._tokenizer, self.num_tokens = wanted, tokenizer, 0
        self.num_accepted_by_step: list[int] = []
        self._has_echoed = not wanted.echoes
        self.stream = AnswerStream(
            tokenizer, wanted.request.prompt_ids, stop_strings=wanted.stop, includes_stop=False, num_top=wanted.num_top
        )

    @property
    def stats(self) -> RequestStats:
        return self.stream.stats or RequestStats()

    def add(self, output: EngineOutput) -> AnswerPart | None:
        """Returns what the output adds, an echoed prompt included, or None."""
        echo = [] if self._has_echoed else self._echo(output)
        if not self.wanted.max_tokens:
            output = replace(output, token_ids=[], finish_reason=FinishReason.LENGTH)
        part = self.stream.add(output)
        self.num_tokens += len(part.tokens)
        if part.tokens:  # of one step
            self.num_accepted_by_step.append(sum(token.is_drafted for token in part.tokens))
        part = part._replace(tokens=echo + part.tokens)
        return part if part.tokens or self.stream.reason else None

    def _echo(self, output: EngineOutput) -> list[AnswerToken]:
        """Returns the prompt, with its log-probabilities if the output has them."""
        self._has_echoed = True
        stream = AnswerStream(self._tokenizer)
        prompt = EngineOutput("", self.wanted.request.prompt_ids.tolist(), finish_reason=FinishReason.LENGTH)
        tokens, rest = stream.add(prompt)
        tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + rest)
        if output.context_log_probs is not None:
            for index, row in enumerate(output.context_log_probs.tolist(), 1):
                ids, values = row[1 : 1 + NUM_CONTEXT_TOP], row[1 + NUM_CONTEXT_TOP :]
                top = [(int(one), value) for one, value in zip(ids, values, strict=True)][: self.wanted.num_top]
                tokens[index] = tokens[index]._replace(log_prob=row[0], top=top)
        return tokens


class ApiReply:
    """The answers of one request as the API's objects."""

    has_done = True  # a stream ends with the line [DONE]

    def __init__(self, body: Body, wanted: Sequence[Generation], model: ServedModel) -> None:
        self.body, self.model = body, model
        self.answers = [Answer(one, model.tokenizer) for one in wanted]
        self._has_begun = False

    def add(self, index: int, output: EngineOutput) -> list[Event] | None:
        """Takes an output of one choice. Returns its events, or None if it adds nothing."""
        part = self.answers[index].add(output)
        if part is None:
            return None
        begun, self._has_begun = [] if self._has_begun else self.begin(), True
        return begun + self.chunk(index, part)

    def begin(self) -> list[Event]:
        return []

    def chunk(self, index: int, part: AnswerPart) -> list[Event]:
        raise NotImplementedError

    def end(self) -> list[Event]:
        raise NotImplementedError

    def fail(self, error: ApiError) -> list[Event]:
        """Returns the event with which an error ends a stream."""
        return [(None, error.body())]

    def whole(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts. A prompt counts once for all its answers; cached tokens are whole KV blocks."""
        firsts = self.answers[:: self.body.num_choices]
        sizes = [answer.wanted.request.prompt_ids.size for answer in firsts]
        prompt, block_size = sum(sizes), self.model.kv_block_size
        cached = (min(one.stats.num_reused_blocks * block_size, size) for one, size in zip(firsts, sizes, strict=True))
        completion = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
        }

    @property
    def metrics(self) -> dict[str, Any]:
        """The acceptance of the request's drafts, in the form of vLLM; empty unless the request asks for it.

        Steps without drafts count. num_spec_tokens is null because the speculative length varies by step.
        """
        if self.body.spec_decode_metrics is None:
            return {}
        stats = [answer.stats for answer in self.answers]
        steps, drafted, accepted = (
            sum(getattr(one, name) for one in stats) for name in ("num_steps", "num_drafted", "num_accepted")
        )
        by_step = [count for answer in self.answers for count in answer.num_accepted_by_step]
        by_count = Counter(count for count in by_step if count)
        histogram = [by_count[count] for count in range(max(by_count, default=0) + 1)]
        histogram[0] = max(0, steps - sum(histogram))
        metrics: dict[str, Any] = {
            "mean_acceptance_length": max(1.0, sum(answer.num_tokens for answer in self.answers) / max(steps, 1)),
            "draft_acceptance_rate": accepted / max(drafted, 1),
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": None,
        }
        if self.body.spec_decode_metrics == "detailed":
            metrics["per_step_accepted"] = by_step
        return {"metrics": {"speculative_decoding": metrics}}


class ChoicesReply(ApiReply):
    """A reply that lists choices, each a text with its log-probabilities: completions and chats."""

    kinds = ("", "")  # of the whole object, and of a chunk
    id_prefix = ""

    def __init__(self, body: Body, wanted: Sequence[Generation], model: ServedModel) -> None:
        super().__init__(body, wanted, model)
        reply_id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self._frame = {"id": reply_id, "created": int(time.time()), "model": model.name}
        self._texts = ["" for _ in wanted]
        self._tokens: list[list[AnswerToken]] = [[] for _ in wanted]

    def end(self) -> list[Event]:
        extra = {"usage": self.usage} if self.body.stream_options.include_usage else {}
        extra |= self.metrics
        return [(None, self._chunk_of([]) | extra)] if extra else []

    def whole(self) -> dict[str, Any]:
        choices = list(map(self._choice, range(len(self.answers))))
        return self._frame | {"object": self.kinds[0], "choices": choices, "usage": self.usage} | self.metrics

    def _choice(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._frame | {"object": self.kinds[1], "choices": choices}
        return chunk | ({"usage": self.usage} if self.body.stream_options.continuous_usage_stats else {})

    def _event(self, choice: dict[str, Any], part: AnswerPart) -> list[Event]:
        if self.body.return_token_details:
            choice["token_details"] = [piece._asdict() for piece in part.pieces]
        return [(None, self._chunk_of([choice]))]


class CompletionReply(ChoicesReply):
    kinds = ("text_completion", "text_completion")
    id_prefix = "cmpl"
    body: CompletionBody

    def chunk(self, index: int, part: AnswerPart) -> list[Event]:
        text, reason = part.text, self.answers[index].stream.reason
        tokens = part.tokens if self.body.logprobs is not None else []
        log_probs = self._log_probs(tokens, len(self._texts[index])) if tokens else None
        self._texts[index] += text
        self._tokens[index] += tokens
        if not (text or reason or tokens):
            return []
        return self._event({"index": index, "text": text, "logprobs": log_probs, "finish_reason": reason}, part)

    def _choice(self, index: int) -> dict[str, Any]:
        answer, wants_log_probs = self.answers[index], self.body.logprobs is not None
        choice = {
            "index": index,
            "text": self._texts[index],
            "logprobs": self._log_probs(self._tokens[index], 0) if wants_log_probs else None,
            "finish_reason": answer.stream.reason,
        }
        return choice | ({"stop_reason": answer.stream.matched_stop} if answer.stream.is_stopped else {})

    def _log_probs(self, tokens: list[AnswerToken], offset: int) -> dict[str, Any]:
        """offset: characters of the choice's text before these tokens."""
        names = [named(self.model.tokenizer, token.token_id)[0] for token in tokens]
        tops = [  # the answer's own token is one of them, even if it is not among the best
            {name: token.log_prob} | {named(self.model.tokenizer, one)[0]: value for one, value in token.top}
            for name, token in zip(names, tokens, strict=True)
        ]
        return {
            "tokens": names,
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [None if token.log_prob is None else top for token, top in zip(tokens, tops, strict=True)],
            "text_offset": list(accumulate((len(token.text) for token in tokens), initial=offset))[:-1],
        }


class ChatReply(ChoicesReply):
    kinds = ("chat.completion", "chat.completion.chunk")
    id_prefix = "chatcmpl"
    body: ChatBody

    def __init__(self, body: ChatBody, wanted: Sequence[Generation], model: ServedModel) -> None:
        super().__init__(body, wanted, model)
        is_single = body.parallel_tool_calls is False
        self._finders = [CallFinder(one.tool_form, is_single=is_single) for one in wanted]

    def begin(self) -> list[Event]:
        begun = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [(None, self._chunk_of([{"index": index, **begun}])) for index in range(len(self.answers))]

    def chunk(self, index: int, part: AnswerPart) -> list[Event]:
        reason = self.answers[index].stream.reason
        text, calls = self._finders[index].read(part.text, is_last=reason is not None)
        tokens = part.tokens if self.body.logprobs else []
        self._texts[index] += text
        self._tokens[index] += tokens
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            first = len(self._finders[index].calls) - len(calls)
            delta["tool_calls"] = [{"index": number, **call.as_dict()} for number, call in enumerate(calls, first)]
        if not (delta or reason or tokens):
            return []
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._log_probs(tokens) if tokens else None,
            "finish_reason": self._finish_reason(index),
        }
        return self._event(choice, part)

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
            "finish_reason": self._finish_reason(index),
            "stop_reason": self.answers[index].stream.matched_stop,
        }

    def _finish_reason(self, index: int) -> str | None:
        reason = self.answers[index].stream.reason
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
        text, token_bytes = named(self.model.tokenizer, token_id)
        return {"token": text, "logprob": value, "bytes": list(token_bytes)}


class ResponsesReply(ApiReply):
    """A reply of /v1/responses: the answer's text and calls become items, in their order."""

    has_done = False
    body: ResponsesBody

    def __init__(self, body: ResponsesBody, wanted: Sequence[Generation], model: ServedModel) -> None:
        super().__init__(body, wanted, model)
        self._id, self._created = _new_id("resp"), int(time.time())
        self._finder = CallFinder(wanted[0].tool_form, is_single=body.parallel_tool_calls is False)
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # the last item is a message that still grows
        self._num_events = 0

    def begin(self) -> list[Event]:
        return [
            self._event("response.created", response=self._response("in_progress", [])),
            self._event("response.in_progress", response=self._response("in_progress", [])),
        ]

    def chunk(self, index: int, part: AnswerPart) -> list[Event]:
        is_last = self.answers[index].stream.reason is not None
        text, calls = self._finder.read(part.text, is_last=is_last)
        events = []
        if text or (is_last and not calls and not self._items):  # an answer has at least one item, which may be empty
            events += [] if self._is_open else self._open_message()
            self._items[-1]["content"][0]["text"] += text
            if text:
                events.append(self._event("response.output_text.delta", **self._position(), delta=text, logprobs=[]))
        if calls or is_last:
            events += self._close_message(self._status() if is_last and not calls else "completed")
        for call in calls:
            events += self._add_call(call)
        return events

    def end(self) -> list[Event]:
        return [self._event(f"response.{self._status()}", response=self.whole())]

    def fail(self, error: ApiError) -> list[Event]:
        return [self._event("error", code=error.code, message=error.message, param=error.param)]

    def _open_message(self) -> list[Event]:
        self._is_open = True
        message = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
        self._items.append({**message, "status": "in_progress", "content": [_part("")]})
        return [
            self._item_event("response.output_item.added", self._items[-1] | {"content": []}),
            self._event("response.content_part.added", **self._position(), part=_part("")),
        ]

    def _close_message(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        [part], self._items[-1]["status"] = self._items[-1]["content"], status
        return [
            self._event("response.output_text.done", **self._position(), text=part["text"], logprobs=[]),
            self._event("response.content_part.done", **self._position(), part=part),
            self._item_event("response.output_item.done", self._items[-1]),
        ]

    def _add_call(self, call: FunctionCall) -> list[Event]:
        item = {"id": _new_id("fc"), "type": "function_call", "call_id": call.call_id, "name": call.name}
        self._items.append(item | {"arguments": call.arguments, "status": "completed"})
        position = {"item_id": item["id"], "output_index": len(self._items) - 1}
        done = {**position, "name": call.name, "arguments": call.arguments}
        return [
            self._item_event("response.output_item.added", item | {"arguments": "", "status": "in_progress"}),
            self._event("response.function_call_arguments.delta", **position, delta=call.arguments),
            self._event("response.function_call_arguments.done", **done),
            self._item_event("response.output_item.done", self._items[-1]),
        ]

    def whole(self) -> dict[str, Any]:
        response = self._response(self._status(), self._items)
        usage = self.usage
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return response | self.metrics

    def _status(self) -> str:
        return "incomplete" if self.answers[0].stream.reason == "length" else "completed"

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        choice = body.tool_choice or ("auto" if body.tools else "none")
        if isinstance(choice, Tool):
            choice = {"type": "function", "name": choice.function.name}
        text_format = body.answer_format.model_dump(by_alias=True) if body.answer_format else {"type": "text"}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model.name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": text_format},
            "tool_choice": choice,
            "tools": [{"type": "function", **tool.function.model_dump()} for tool in body.tools or []],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "usage": None,
        }

    def _position(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _item_event(self, name: str, item: dict[str, Any]) -> Event:
        return self._event(name, output_index=len(self._items) - 1, item=copy.deepcopy(item))

    def _event(self, kind: str, /, **data: Any) -> Event:
        self._num_events += 1
        return kind, {"type": kind, "sequence_number": self._num_events - 1, **data}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def named(tokenizer: TextTokenizer, token_id: int) -> tuple[str, bytes]:
    """Returns a token's text and bytes. Part of a character is named by its bytes, so that every token has a name."""
    token_bytes = tokenizer.bytes_of(token_id)
    if not token_bytes:  # a special token, or no byte-level vocabulary
        text = tokenizer.decode([token_id], skips_special_tokens=False)
        if tokenizer.token_bytes is None:  # behind another token, as the first one loses its space
            text = tokenizer.decode([token_id] * 2, skips_special_tokens=False).removeprefix(text)
        return text, text.encode()
    try:
        return token_bytes.decode(), token_bytes
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes), token_bytes
