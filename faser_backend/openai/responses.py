"""The objects and events of /v1/responses."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Sequence
from typing import Any

from faser_backend.openai.answer import Answer, Piece
from faser_backend.openai.fields import ResponsesBody, Tool
from faser_backend.openai.replies import ApiReply, Event
from faser_backend.openai.tools import CallFinder, FunctionCall, ToolForm


class ResponsesReply(ApiReply):
    """One answer, whose text and calls become items in the order in which they come."""

    has_done = False
    body: ResponsesBody

    def __init__(self, body: ResponsesBody, answers: Sequence[Answer], form: type[ToolForm] | None) -> None:
        super().__init__(body, answers)
        self._id = _new_id("resp")
        self._created = int(time.time())
        self._finder = CallFinder(form, is_single=body.parallel_tool_calls is False)
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item is a message that text is added to
        self._num_events = 0

    def begin(self) -> list[Event]:
        return [
            self._event("response.created", response=self._response("in_progress", [])),
            self._event("response.in_progress", response=self._response("in_progress", [])),
        ]

    def chunk(self, index: int, piece: Piece) -> list[Event]:
        is_last = piece.finish_reason is not None
        text, calls = self._finder.read(piece.text, is_last=is_last)
        events = []
        if text or (is_last and not calls and not self._items):  # an answer has an item, if an empty one
            events += [] if self._is_open else self._open_message()
            self._items[-1]["content"][0]["text"] += text
            if text:
                events.append(self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[]))
        if calls or is_last:
            events += self._close_message(self._status() if is_last and not calls else "completed")
        for call in calls:
            events += self._add_call(call)
        return events

    def end(self) -> list[Event]:
        return [self._event(f"response.{self._status()}", response=self.whole())]

    def _open_message(self) -> list[Event]:
        self._is_open = True
        message = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
        self._items.append({**message, "status": "in_progress", "content": [_part("")]})
        return [
            self._item_event("response.output_item.added", self._items[-1] | {"content": []}),
            self._event("response.content_part.added", **self._place(), part=_part("")),
        ]

    def _close_message(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        [part], self._items[-1]["status"] = self._items[-1]["content"], status
        return [
            self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=part),
            self._item_event("response.output_item.done", self._items[-1]),
        ]

    def _add_call(self, call: FunctionCall) -> list[Event]:
        item = {"id": _new_id("fc"), "type": "function_call", "call_id": call.call_id, "name": call.name}
        self._items.append(item | {"arguments": call.arguments, "status": "completed"})
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        done = {**place, "name": call.name, "arguments": call.arguments}
        return [
            self._item_event("response.output_item.added", item | {"arguments": "", "status": "in_progress"}),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
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
        return "incomplete" if self.answers[0].finish_reason == "length" else "completed"

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
            "model": self.answers[0].model.name,
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

    def _place(self) -> dict[str, Any]:
        """The place of the last item's text."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _item_event(self, name: str, item: dict[str, Any]) -> Event:
        return self._event(name, output_index=len(self._items) - 1, item=copy.deepcopy(item))

    def _event(self, kind: str, /, **data: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **data}
        self._num_events += 1
        return kind, event


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
