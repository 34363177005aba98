"""Messages [{role, content}] -> the prompt that a chat template makes of them.

Templates are rendered by a process of their own (chat_worker.py), started with the first conversation, so that a
template that loops, fills memory or crashes costs its request and nothing else. Knows nothing of token ids.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faser_backend.core.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
NO_TEMPLATE = (
    "these engines came without a chat template: send a plain prompt, give a template with --chat-template FILE, "
    "or build again from a checkpoint that has one"
)
_WORKER = Path(__file__).with_name("chat_worker.py")

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
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

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
        return self._text_of(reply)

    def compile(self) -> None:
        """Raises RequestError naming chat_template where it is not a template."""
        self._text_of(self._call(None))

    def close(self) -> None:
        """Ends the process; a later call starts another."""
        with self._lock:
            self._end_worker()

    def _text_of(self, reply: dict[str, str]) -> str:
        if "error" in reply:
            raise RequestError("chat_template", self._template, f"cannot be rendered: {reply['error']}")
        return reply["text"]

    def _call(self, messages: list[Message] | None, tools: list[dict[str, Any]] | None = None) -> dict[str, str]:
        call = {
            "template": self._template,
            "special_tokens": self._special_tokens,
            "messages": messages,
            "tools": tools,
        }
        line = json.dumps(call).encode() + b"\n"
        with self._lock:
            if self._worker is None or self._worker.poll() is not None:
                self._end_worker()
                self._worker = _start_worker()
            assert self._worker.stdin is not None and self._worker.stdout is not None
            try:
                self._worker.stdin.write(line)
                self._worker.stdin.flush()
                reply = self._worker.stdout.readline()
            except BrokenPipeError:
                reply = b""
            if not reply.endswith(b"\n"):
                return {"error": self._end_worker()}
        return json.loads(reply)

    def _end_worker(self) -> str:
        """Ends what may be left of the process; says why it ended before it could answer."""
        worker, self._worker = self._worker, None
        if worker is None:
            return ""
        _, errors = worker.communicate()
        if worker.returncode == -signal.SIGPROF:
            return "it takes too long"
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return f"its process ended with status {worker.returncode}: {last_line}"


def check_template(template: str) -> None:
    """Raises RequestError naming chat_template where it cannot be compiled."""
    renderer = ChatRenderer(template, {})
    try:
        renderer.compile()
    finally:
        renderer.close()


def _start_worker() -> subprocess.Popen[bytes]:
    # -P: the worker's own folder must not hide modules of the standard library behind files of ours
    return subprocess.Popen(
        [sys.executable, "-P", str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


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
