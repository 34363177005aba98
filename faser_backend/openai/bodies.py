"""The bodies of requests: the fields of every endpoint, and `read_body`, which reads and checks them.

A field that no version of the API has is ignored, as by other servers. A field that this server cannot honour is
refused if it asks for something. `requests.py` turns a checked body into the engine's requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from faser_backend.core.errors import Brief, RequestError, refusal_of
from faser_backend.core.request import NUM_CONTEXT_TOP
from faser_backend.openai.errors import ApiError

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # per message
MAX_CALLS = 128  # per message; also the most tools per request
MAX_BIASES = 1024
MAX_METADATA = 16
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Real = Annotated[float, Field(allow_inf_nan=False)]
FIRST: Any = Field(fail_fast=True)  # in a list: an error per bad entry would take seconds and gigabytes
Ids = Annotated[list[int], FIRST]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Name = Annotated[str, Field(max_length=64)]


def _at_most(limit: int) -> BeforeValidator:
    """Counts an object's entries before any of them is checked."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"at most {limit} entries are allowed, not {len(value)}")
        return value

    return BeforeValidator(check)


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(_Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # an extension of other servers: usage in every chunk


class Body(_Fields):
    """The fields that all endpoints share. Those from top_k on are extensions, named as in other servers."""

    model: str | None = None
    modalities: Annotated[list[Literal["text"]], FIRST, Field(max_length=1)] | None = None
    temperature: Annotated[Real, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions, BeforeValidator(lambda it: {} if it is None else it)] = StreamOptions()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Real, Field(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    num_draft_tokens: Count | None = None  # limits speculation; 0 turns it off
    spec_decode_metrics: Literal["summary", "detailed"] | None = None  # adds `metrics` to the answer
    return_token_details: bool | None = None  # chunks mark the pieces of text that were drafted

    prompt_field: ClassVar = "prompt"  # as clients know it

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def num_top(self) -> int | None:
        """The number of alternatives per token; None without log-probabilities."""
        return None

    @property
    def wants_stats(self) -> bool:
        wants_metrics = self.spec_decode_metrics is not None
        return bool(wants_metrics or self.return_token_details or self.stream_options.continuous_usage_stats)


AnyBody = TypeVar("AnyBody", bound=Body)


class ChoicesBody(Body):
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[list[Stop], FIRST, Field(max_length=MAX_STOPS)] | None = None
    logit_bias: Annotated[dict[str, Annotated[Real, Field(ge=-100, le=100)]], _at_most(MAX_BIASES)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: object) -> object:
        return None if value in ("", [""]) else [value] if isinstance(value, str) else value

    @property
    def num_choices(self) -> int:
        return self.n or 1


class CompletionBody(ChoicesBody):
    prompt: str | Annotated[list[str], FIRST] | Ids | Annotated[list[Ids], FIRST]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=NUM_CONTEXT_TOP)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if isinstance(self.prompt, list) and not self.prompt:
            raise RequestError("prompt", self.prompt, "must hold at least one prompt")
        if self.best_of is not None and self.best_of != self.num_choices:
            limit = f"must equal n = {self.num_choices}: all candidates are returned"
            raise RequestError("best_of", self.best_of, limit)
        return self

    @property
    def num_top(self) -> int | None:
        return self.logprobs


class TextPart(_Fields):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""


Content = str | Annotated[list[TextPart], FIRST, Field(max_length=MAX_PARTS)]


def text_of(content: Content | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


class CalledFunction(_Fields):
    name: str
    arguments: str


class ToolCall(_Fields):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST, Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[Message], FIRST, Field(min_length=1, max_length=MAX_MESSAGES)]


class FunctionTool(_Fields):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Fields):
    type: Literal["function"]
    function: FunctionTool


class AnswerFormat(_Fields):
    """The format of /v1/responses; chats nest name and schema in an object `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name = "answer"
    json_schema: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="before")
    @classmethod
    def _is_flat(cls, value: Any) -> Any:
        nested = value.get("json_schema") if isinstance(value, dict) else None
        return {**nested, "type": value.get("type")} if isinstance(nested, dict) else value

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("a schema is required with type json_schema")
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        return {"text": None, "json_object": {"type": "object"}, "json_schema": self.json_schema}[self.type]


class ConversationBody(Body):
    """The fields that /v1/chat/completions and /v1/responses share."""

    prompt_field: ClassVar = "messages"
    format_field: ClassVar = "response_format"
    messages: Messages
    tools: Annotated[list[Tool], FIRST, Field(max_length=MAX_CALLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def answer_format(self) -> AnswerFormat | None:
        found = getattr(self, self.format_field)
        return found.format if isinstance(found, TextOptions) else found

    @model_validator(mode="after")
    def _chooses_one_of_its_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or []]
        if isinstance(self.tool_choice, Tool) and self.tool_choice.function.name not in names:
            raise RequestError("tool_choice", self.tool_choice.function.name, "no tool has this name")
        if self.tool_choice == "required" and not self.tools:
            raise RequestError("tool_choice", self.tool_choice, "needs tools")
        return self


class Prediction(_Fields):
    type: Literal["content"]
    content: Content


class ChatBody(ChoicesBody, ConversationBody):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: AnswerFormat | None = None
    prediction: Prediction | None = None  # verified as the client's own draft

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", self.top_logprobs, "needs logprobs = true")
        return self

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TextOptions(_Fields):
    format: AnswerFormat | None = None


def _nested(value: object) -> object:
    """Nests a function of /v1/responses, {"type": "function", "name": ...}, as chats do."""
    if not isinstance(value, Mapping) or value.get("type") != "function" or "function" in value:
        return value
    return {"type": "function", "function": {name: one for name, one in value.items() if name != "type"}}


class ResponsesBody(ConversationBody):
    """The body of /v1/responses, rewritten as a chat: items of the input become messages."""

    prompt_field: ClassVar = "input"
    format_field: ClassVar = "text"
    messages: Messages = Field(alias="input")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    instructions: str | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[Name, Annotated[str, Field(max_length=512)]], _at_most(MAX_METADATA)] | None = None
    store: bool | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _items_are_messages(cls, items: object) -> object:
        """Puts calls that follow one another, and the assistant's text before them, into one message."""
        if isinstance(items, str):
            return [{"role": "user", "content": items}]
        if not isinstance(items, list):
            return items
        messages: list[object] = []
        calls: list[object] | None = None
        for item in items:
            kind = item.get("type") if isinstance(item, Mapping) else None
            if kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                if calls is None:
                    calls = []
                    messages.append({"role": "assistant", "tool_calls": calls})
                calls.append({"id": item.get("call_id"), "function": function})
                continue
            calls = None
            if kind == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
            elif isinstance(item, Mapping) and item.get("role") == "assistant" and "tool_calls" not in item:
                calls = []
                messages.append({**item, "tool_calls": calls})
            else:
                messages.append(item)
        return messages

    @field_validator("tools", "tool_choice", mode="before")
    @classmethod
    def _functions_are_nested(cls, value: object) -> object:
        return [_nested(one) for one in value] if isinstance(value, list) else _nested(value)

    @model_validator(mode="after")
    def _begins_with_its_instructions(self) -> Self:
        if self.instructions:
            self.messages.insert(0, Message(role="system", content=self.instructions))
        return self


NOTHING = (None, False, 0, [], {}, "", "none")  # values of a refused field that ask for nothing
_REFUSED_EVERYWHERE = {"use_beam_search": "beam search", "lora": "adapters"}
REFUSED: dict[type[Body], dict[str, str]] = {
    CompletionBody: {"suffix": "text after the completion", **_REFUSED_EVERYWHERE},
    ChatBody: {
        "functions": "replaced by tools",
        "function_call": "replaced by tool_choice",
        "audio": "audio",
        "web_search_options": "web search",
        "reasoning_effort": "reasoning models",
        **_REFUSED_EVERYWHERE,
    },
    ResponsesBody: {
        "previous_response_id": "stored responses; send the conversation as input",
        "conversation": "stored conversations; send the conversation as input",
        "background": "background responses",
        "prompt": "stored prompts",
        "include": "additional outputs",
        "reasoning": "reasoning models",
        "top_logprobs": "log-probabilities; use /v1/chat/completions",
        "max_tool_calls": "tools that the server runs",
        **_REFUSED_EVERYWHERE,
    },
}

# -- from bytes to fields ------------------------------------------------------------------------------------------
# Reading JSON and checking it hold the interpreter's lock, so every client waits for it. Its cost follows the number of
# values, which are therefore counted first, in milliseconds. Large bodies are read in a thread, one at a time.
MAX_BODY_BYTES = 4 << 20
MAX_HELD_BYTES = 128 << 20  # of all bodies beyond SMALL_BYTES that are being received or read
BODY_TIMEOUT_S = 30.0
SMALL_BYTES = 16 << 10  # read at once, on the event loop
MAX_VALUES = 64 << 10  # per body: entries of its lists, keys and values of its objects
MAX_IDS = 256 << 10  # values where prompts may be token ids
MAX_CONTAINERS = 32 << 10  # lists and objects
_READER = ThreadPoolExecutor(1, "large-bodies")


async def read_body(kind: type[AnyBody], request: Request) -> AnyBody:
    """Raises ApiError or RequestError naming the first field that is wrong, its value and the limit."""
    with _Held() as held:
        raw = await _receive(request, held)
        if len(raw) <= SMALL_BYTES:
            return _read(kind, raw)
        return await asyncio.get_running_loop().run_in_executor(_READER, _read, kind, raw)


class _Held:
    """Counts the memory that large bodies of all requests take, for the length of a `with` block."""

    in_all = 0

    def __init__(self) -> None:
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """num_bytes: of the body so far. Raises ApiError beyond MAX_HELD_BYTES."""
        if num_bytes > SMALL_BYTES:
            _Held.in_all += num_bytes - self._num_bytes
            self._num_bytes = num_bytes
            if _Held.in_all > MAX_HELD_BYTES:
                limit = f"large bodies already take the {MAX_HELD_BYTES} bytes that all may take; retry later"
                raise ApiError(limit, status=503, code="unavailable")

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *exception: object) -> None:
        _Held.in_all -= self._num_bytes


async def _receive(request: Request, held: _Held) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
                held.grow(len(body))
    except TimeoutError:
        raise ApiError(f"the body took longer than {BODY_TIMEOUT_S:.0f} s", status=408) from None
    except ClientDisconnect:
        raise ApiError("the client closed its connection", status=400) from None
    return bytes(body.removeprefix(b"\xef\xbb\xbf"))  # some editors write this mark before UTF-8


def _read(kind: type[AnyBody], raw: bytes) -> AnyBody:
    return check_body(kind, parse(raw, MAX_IDS if kind is CompletionBody else MAX_VALUES))


def parse(raw: bytes, max_values: int = MAX_VALUES) -> object:
    """Reads standard JSON: no NaN, no half surrogate pairs, at most 200 levels. Raises ApiError."""
    num_values, num_containers = _counts(raw, max_values)
    if num_values > max_values or num_containers > MAX_CONTAINERS:
        limit = f"at most {max_values} values and {MAX_CONTAINERS} lists and objects are allowed"
        raise ApiError(f"the body has {num_values} values, {num_containers} lists and objects: {limit}", status=413)
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None


def _counts(raw: bytes, max_values: int) -> tuple[int, int]:
    """Returns (values, lists and objects) of a JSON text: exact near the limits, else an upper bound."""
    num_values, num_containers = raw.count(b",") + raw.count(b":"), raw.count(b"[") + raw.count(b"{")
    if num_values <= max_values and num_containers <= MAX_CONTAINERS:
        return num_values, num_containers
    # Marks inside strings do not count. Without escapes, every quote begins or ends a string.
    text = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = ~np.logical_xor.accumulate(text == ord('"'))

    def num(marks: str) -> int:
        return int(np.count_nonzero(((text == ord(marks[0])) | (text == ord(marks[1]))) & is_outside))

    return num(",:"), num("[{")


def check_body(kind: type[AnyBody], content: object) -> AnyBody:
    """Raises ApiError or RequestError naming the first field that is wrong, its value and the limit."""
    if not isinstance(content, Mapping):
        raise ApiError(f"the body must be a JSON object, not {type(content).__name__}")
    for name, meaning in REFUSED[kind].items():
        if name in content and content[name] not in NOTHING:
            raise RequestError(name, Brief(content[name]), f"not supported: {meaning}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise refusal_of(error) from None
