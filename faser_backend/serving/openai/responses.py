"""The objects and events of /v1/responses: text in, text out."""

from __future__ import annotations

import secrets
import time
from typing import Any

from faser_backend.serving.openai.answer import Answer, Piece
from faser_backend.serving.openai.fields import ResponsesBody
from faser_backend.serving.openai.replies import Event, metrics_of, usage_of


class ResponsesReply:
    """replies.Reply, of one answer."""

    def __init__(self, body: ResponsesBody, model: str, answer: Answer, kv_block_size: int) -> None:
        self.answers = [answer]
        self._body, self._model, self._answer = body, model, answer
        self._kv_block_size = kv_block_size
        self._id, self._message_id = (f"{prefix}_{secrets.token_hex(16)}" for prefix in ("resp", "msg"))
        self._created = int(time.time())
        self._text = ""
        self._num_events = 0

    def begin(self) -> list[Event]:
        place = {"output_index": 0}
        part = {"item_id": self._message_id, **place, "content_index": 0, "part": _part("")}
        return [
            self._event("response.created", response=self._response("in_progress", [])),
            self._event("response.in_progress", response=self._response("in_progress", [])),
            self._event("response.output_item.added", **place, item=self._message("in_progress", [])),
            self._event("response.content_part.added", **part),
        ]

    def chunk(self, index: int, piece: Piece) -> list[Event]:
        self.add(index, piece)
        if not piece.text:
            return []
        return [self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=[])]

    def end(self) -> list[Event]:
        part, status = _part(self._text), self._status()
        item = self._message(status, [part])
        return [
            self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=self.whole()),
        ]

    def add(self, index: int, piece: Piece) -> None:
        self._text += piece.text

    def whole(self) -> dict[str, Any]:
        status = self._status()
        response = self._response(status, [self._message(status, [_part(self._text)])])
        usage = usage_of(self.answers, 1, self._kv_block_size)
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if self._body.spec_decode_metrics is not None:
            response["metrics"] = metrics_of(self._body, self.answers)
        return response

    def _status(self) -> str:
        return "incomplete" if self._answer.finish_reason == "length" else "completed"

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        text_format = body.text.format.model_dump(by_alias=True) if body.text and body.text.format else {"type": "text"}
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
            "model": self._model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": text_format},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "usage": None,
        }

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, **data: Any) -> Event:
        event = {"type": name, "sequence_number": self._num_events, **data}
        self._num_events += 1
        return name, event


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
