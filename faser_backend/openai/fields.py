"""Fields of requests: one model per endpoint, and the fields that are refused by name.

A field that no version of the API knows is ignored, as other servers do; one that this server cannot honour is refused
where it asks for something.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from faser_backend.core.errors import RequestError
from faser_backend.core.request import NUM_CONTEXT_TOP

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of a message
MAX_CALLS = 128  # of a message, and tools of a request
MAX_BIASES = 1024
MAX_METADATA = 16

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Real = Annotated[float, Field(allow_inf_nan=False)]
FIRST: Any = Field(fail_fast=True)  # of a list: an error for each of many entries would take seconds and gigabytes
Ids = Annotated[list[int], FIRST]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
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
    include_usage: bool = False
    continuous_usage_stats: bool = False  # as other servers extend it: usage with every chunk


class Body(_Fields):
    """The fields that all endpoints share. Beyond OpenAI's own: those from top_k on, as other servers name them."""

    model: str | None = None
    modalities: Annotated[list[Literal["text"]], FIRST, Field(max_length=1)] | None = None
    temperature: Annotated[Real, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Real, Field(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool = False
    num_draft_tokens: Count | None = None  # a cap on speculation; 0 opts out
    spec_decode_metrics: Literal["summary", "detailed"] | None = None  # the answer's `metrics`
    return_token_details: bool = False  # chunks show which pieces of text were drafted

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def num_top(self) -> int | None:
        """Best tokens wanted beside each; None: no log-probabilities."""
        return None


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
    """As /v1/responses writes it; in chats name and schema lie in an object `json_schema`."""

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
    def schema_of_answer(self) -> dict[str, Any] | None:
        return {"text": None, "json_object": {"type": "object"}, "json_schema": self.json_schema}[self.type]


class ConversationBody(Body):
    """The fields that a chat and /v1/responses share."""

    messages: Messages
    tools: Annotated[list[Tool], FIRST, Field(max_length=MAX_CALLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    @model_validator(mode="after")
    def _chooses_of_its_tools(self) -> Self:
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

    @property
    def answer_format(self) -> AnswerFormat | None:
        return self.response_format


class TextOptions(_Fields):
    format: AnswerFormat | None = None


def _nested(value: object) -> object:
    """Functions of /v1/responses lie flat: {"type": "function", "name": ...} -> as in chats."""
    if not isinstance(value, Mapping) or value.get("type") != "function" or "function" in value:
        return value
    return {"type": "function", "function": {name: one for name, one in value.items() if name != "type"}}


class ResponsesBody(ConversationBody):
    """Written as a chat: items of the input become messages."""

    messages: Messages = Field(alias="input")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    instructions: str | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[Name, Annotated[str, Field(max_length=512)]], _at_most(MAX_METADATA)] | None = None
    store: bool | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _items_are_messages(cls, items: object) -> object:
        """Calls that follow one another are one message's."""
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

    @property
    def answer_format(self) -> AnswerFormat | None:
        return self.text.format if self.text else None


# -- refused where they ask for something --------------------------------------------------------------------------
NOTHING = (None, False, 0, [], {}, "", "none")
_REFUSED_EVERYWHERE = {"use_beam_search": "beam search", "lora": "adapters"}
REFUSED: dict[type[Body], dict[str, str]] = {
    CompletionBody: {"suffix": "text behind the completion", **_REFUSED_EVERYWHERE},
    ChatBody: {
        "functions": "the field's older form; use tools",
        "function_call": "the field's older form; use tool_choice",
        "audio": "audio",
        "web_search_options": "searching the web",
        "reasoning_effort": "reasoning models",
        **_REFUSED_EVERYWHERE,
    },
    ResponsesBody: {
        "previous_response_id": "stored answers; send the conversation as input",
        "conversation": "stored conversations; send the conversation as input",
        "background": "background answers",
        "prompt": "stored prompts",
        "include": "further outputs",
        "reasoning": "reasoning models",
        "top_logprobs": "log-probabilities; use /v1/chat/completions",
        "max_tool_calls": "tools of the server's own",
        **_REFUSED_EVERYWHERE,
    },
}
