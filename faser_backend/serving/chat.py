"""Messages [{role, content}] -> the prompt that a chat template makes of them.

Templates are rendered by a process of their own (chat_worker.py), started with the first conversation, so that a
template that loops, fills memory or crashes costs its request and nothing else. Knows nothing of token ids.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faser_backend.core.errors import RequestError
from faser_backend.serving.worker import Worker, WorkerError

ROLES = ("system", "developer", "user", "assistant", "tool")
NO_TEMPLATE = (
    "these engines came without a chat template: send a plain prompt, give a template with --chat-template FILE, "
    "or build again from a checkpoint that has one"
)

Message = dict[str, Any]  # what templates read: role and content, and of OpenAI's API tool_calls and the like


def read_messages(field: str, text: str) -> list[Message]:
    """The conversation in a JSON text. Raises RequestError naming the field, the part of it and its value."""
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(field, text, f"must be JSON: {error}") from None
    if not isinstance(messages, list) or not messages:
        raise RequestError(field, messages, 'must list at least one message {"role": ..., "content": ...}')
    for index, message in enumerate(messages):
        _check_message(f"{field}[{index}]", message)
    return messages


class ChatRenderer:
    """One chat template. Thread-safe: conversations are rendered one at a time."""

    def __init__(self, template: str | None, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._special_tokens = dict(special_tokens)
        # -P: the worker's own folder must not hide modules of the standard library behind files of ours
        self._worker = Worker("-P", str(Path(__file__).with_name("chat_worker.py")))

    def render(self, field: str, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt, ending where the assistant's answer begins. tools: functions that the template shows the model.

        Raises RequestError naming `field` where the template refuses these messages or there is none, and
        chat_template where the template fails.
        """
        if self._template is None:
            raise RequestError(field, messages, NO_TEMPLATE)
        reply = self._call(messages, tools)
        if "refusal" in reply:
            raise RequestError(field, messages, f"the chat template refuses them: {reply['refusal']}")
        return reply["text"]

    def compile(self) -> None:
        """Raises RequestError naming chat_template where it is not a template."""
        self._call(None)

    def close(self) -> None:
        """Ends the process; a later call starts another."""
        self._worker.close()

    def _call(self, messages: list[Message] | None, tools: list[dict[str, Any]] | None = None) -> dict[str, str]:
        call = {"template": self._template, "special_tokens": self._special_tokens}
        try:
            reply = json.loads(self._worker.call(json.dumps(call | {"messages": messages, "tools": tools}).encode()))
        except WorkerError as error:
            reply = {"error": "it takes too long" if error.status == -signal.SIGPROF else str(error)}
        if "error" in reply:
            raise RequestError("chat_template", self._template, f"cannot be rendered: {reply['error']}")
        return reply


def check_template(template: str) -> None:
    """Raises RequestError naming chat_template where it cannot be compiled."""
    renderer = ChatRenderer(template, {})
    try:
        renderer.compile()
    finally:
        renderer.close()


def _check_message(name: str, message: object) -> None:
    if not isinstance(message, dict):
        raise RequestError(name, message, 'must be an object {"role": ..., "content": ...}')
    for key in message:
        if key not in ("role", "content"):
            raise RequestError(f"{name}.{key}", message[key], "not supported: a message is its role and its content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RequestError(f"{name}.role", role, f"must be one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise RequestError(f"{name}.content", content, "must be text")
    try:
        content.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can write and UTF-8 cannot
        raise RequestError(f"{name}.content", content, "must be valid Unicode") from None
