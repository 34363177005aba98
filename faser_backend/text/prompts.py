"""`PromptFormat`: the special tokens and the chat template of an engine directory's prompts.

`engines/tokenizer_files.py` writes it to prompts.json, which the manifest verifies. It is a plain value: the engine's
process sends it to the frontends.

Conversations are rendered here too: messages [{role, content}] -> the prompt that a chat template makes of them. A
separate process (chat_worker.py) renders the templates, so that one that loops, fills memory or crashes fails its own
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
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from faser_backend.core.errors import ConfigError, RequestError, refusal_of
from faser_backend.files import FileError, read_json, read_text, shown
from faser_backend.manifest import EngineManifest

MAX_TEMPLATE_BYTES = 1 << 20
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
        self._template, self._special_tokens = template, dict(special_tokens)
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
        if "developer" not in self._template:  # OpenAI's newer name of the system's role
            messages = [one | ({"role": "system"} if one["role"] == "developer" else {}) for one in messages]
        reply = self._call(messages, tools)
        if "refusal" in reply:
            raise RequestError(field, messages, f"the chat template refuses them: {reply['refusal']}")
        return reply["text"]

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
        renderer._call(None)


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """The format of prompts. Without chat_template, conversations are refused."""

    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # as templates name them, e.g. "bos_token"
    adds_special_tokens: bool = True  # plain prompts get the tokens that tokenizer.json adds
    adds_begin_token: bool = False  # they begin with bos_token even if tokenizer.json adds none

    @classmethod
    def load(
        cls,
        engine_dir: Path,
        manifest: EngineManifest,
        *,
        chat_template_file: Path | None = None,
        adds_special_tokens: bool | None = None,
    ) -> PromptFormat:
        """Reads the checkpoint's format, which the manifest has verified; options override it. Raises ConfigError."""
        content = read_json(engine_dir / manifest.prompts.name)
        begins = content["adds_begin_token"]
        found = cls(content["chat_template"], content["special_tokens"], begins is not False, begins is True)
        if chat_template_file is not None:
            found = replace(found, chat_template=read_template(chat_template_file))
        return found if adds_special_tokens is None else found.adding_special_tokens(adds_special_tokens)

    def adding_special_tokens(self, adds_special_tokens: bool) -> PromptFormat:
        """Returns the format with or without the tokenizer's own tokens around plain prompts."""
        begins = adds_special_tokens and self.adds_begin_token
        return replace(self, adds_special_tokens=adds_special_tokens, adds_begin_token=begins)


def read_template(file: Path) -> str:
    """Reads a file with a chat template. Raises ConfigError naming the file."""
    try:
        return read_text(file, MAX_TEMPLATE_BYTES)
    except FileError as error:
        raise ConfigError(f"chat_template = {shown(file)}: not readable as a template ({error.reason})") from None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a file."""

    text: str
    category: str = ""  # "": the file names none
    token_ids: tuple[int, ...] = ()  # (): not tokenised yet
    is_chat: bool = False  # the text is a user's message, which the chat template surrounds in token_ids


def read_prompts(path: Path) -> list[Prompt]:
    """Returns the prompts of a file, in its order. Raises ConfigError with the file, the line and the reason.

    In a file whose name ends in .txt, each line is a prompt. Otherwise each line is a JSON object with "turns" (as in
    Spec-Bench; the first turn is the prompt), "prompt" or "text", and optionally a "category".
    """
    try:
        # JSON strings may contain other line separators, at which splitlines() would split.
        lines = read_text(path).removeprefix("\ufeff").split("\n")
    except FileError as error:
        raise ConfigError(f"prompts {error}") from None
    read = (lambda line, source: Prompt(line)) if path.suffix == ".txt" else _read_line
    stripped = ((f"prompts {path}, line {number}", line.strip("\r")) for number, line in enumerate(lines, 1))
    found = [read(line, source) for source, line in stripped if line.strip()]
    if not found:
        raise ConfigError(f"prompts {path}: the file holds no prompts")
    return found


def _read_line(line: str, source: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not JSON ({error}); only files named .txt hold plain lines") from None
    field_name = next((name for name in ("turns", "prompt", "text") if isinstance(record, dict) and name in record), "")
    if not field_name:
        raise ConfigError(f'{source}: must be a JSON object with "turns", "prompt" or "text"')
    text, category = record[field_name], record.get("category")
    if field_name == "turns":
        text = text[0] if isinstance(text, list) and text else None
    for name, value in ((field_name, text), ("category", "-" if category is None else category)):
        if not isinstance(value, str) or not value.strip() or value != value.encode(errors="replace").decode():
            raise ConfigError(f"{source}: {name} = {ascii(record[name])[:80]}: must be text, not empty, valid Unicode")
    return Prompt(str(text), str(category or ""))
