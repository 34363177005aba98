"""Renders conversations: messages [{role, content}] -> the prompt that a chat template makes of them.

A separate process (chat_worker.py) renders the templates, so that one that loops, fills memory or crashes fails its own
request only. It starts with the first conversation.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from faser_backend.core.errors import RequestError
from faser_backend.core.validation import refusal_of

WORKER = Path(__file__).with_name("chat_worker.py")
NO_TEMPLATE = (
    "these engines came without a chat template: send a plain prompt, give a template with --chat-template FILE, "
    "or build again from a checkpoint that has one"
)

Message = dict[str, Any]  # as templates read it: role, content, and from OpenAI's API tool_calls and others


class PlainMessage(BaseModel):
    """A message with a role and a text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str


_MESSAGES = TypeAdapter(Annotated[list[PlainMessage], Field(min_length=1)])


def read_messages(field: str, given: str | list[Any]) -> list[Message]:
    """Reads a conversation, or the JSON text of one. Raises RequestError naming the wrong part and its value."""
    try:
        messages = _MESSAGES.validate_json(given) if isinstance(given, str) else _MESSAGES.validate_python(given)
    except ValidationError as error:
        raise refusal_of(error, field) from None
    return [message.model_dump() for message in messages]


class ChatRenderer:
    """A renderer for one chat template. Thread-safe: it renders one conversation at a time.

    Its process starts with the first conversation, and again after it has died.
    """

    def __init__(self, template: str | None, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def render(self, field: str, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """Returns the prompt up to the assistant's answer. tools: functions that the template shows to the model.

        Raises RequestError: for `field` if there is no template or it refuses the messages, for chat_template if the
        template fails.
        """
        if self._template is None:
            raise RequestError(field, messages, NO_TEMPLATE)
        reply = self._call(messages, tools)
        if "refusal" in reply:
            raise RequestError(field, messages, f"the chat template refuses them: {reply['refusal']}")
        return reply["text"]

    def compile(self) -> None:
        """Raises RequestError naming chat_template if it is not a template."""
        self._call(None)

    def close(self) -> None:
        """Ends the process; a later call starts another."""
        with self._lock:
            self._end()

    def _call(self, messages: list[Message] | None, tools: list[dict[str, Any]] | None = None) -> dict[str, str]:
        call = {"template": self._template, "special_tokens": self._special_tokens}
        message = json.dumps(call | {"messages": messages, "tools": tools}).encode()
        with self._lock:
            connection = self._connected()
            try:
                connection.send_bytes(message)
                reply = json.loads(connection.recv_bytes())
            except (OSError, EOFError):
                reply = {"error": self._end()}
        if "error" in reply:
            raise RequestError("chat_template", self._template, f"cannot be rendered: {reply['error']}")
        return reply

    def _connected(self) -> Connection:
        """Returns the connection to the running process, started if needed."""
        if self._connection is None or self._process is None or self._process.poll() is not None:
            self._end()
            self._connection, theirs = Pipe()
            # -P: files in the worker's folder must not hide modules of the standard library
            command = [sys.executable, "-P", str(WORKER), str(theirs.fileno())]
            null, errors = subprocess.DEVNULL, subprocess.PIPE
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=null, stdout=null, stderr=errors, pass_fds=[theirs.fileno()]
                )
        return self._connection

    def _end(self) -> str:
        """Ends the process and returns why it had ended, if it had."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if process is None or connection is None:
            return ""
        connection.close()
        process.kill()
        last_line = process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
        if process.returncode == -signal.SIGPROF:
            return "it takes too long"
        return f"its process ended with status {process.returncode}: {last_line}"


def check_template(template: str) -> None:
    """Raises RequestError naming chat_template if it cannot be compiled."""
    with closing(ChatRenderer(template, {})) as renderer:
        renderer.compile()
