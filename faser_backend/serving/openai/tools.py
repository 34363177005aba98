"""Tool calls: what grammar makes a model write one, and how one is found in its text.

Two forms are known, told apart by the chat template: Hermes's and Qwen's (each call between <tool_call> tags) and
Llama 3's (the answer is one JSON object, or several with semicolons between).
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

from faser_backend.serving.openai.errors import ApiError
from faser_backend.serving.openai.fields import ChatBody, FunctionTool, NamedTool
from faser_backend.serving.openai.sampling import Guide

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_ANYTHING: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Call:
    """A function the model calls; arguments: JSON text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ToolForm(Protocol):
    """How one kind of model writes its calls."""

    arguments_key: str

    def required_guide(self, tools: list[FunctionTool]) -> Guide:
        """The grammar of an answer that is exactly one call of one of the tools."""
        ...

    def offered_guide(self, tools: list[FunctionTool]) -> Guide | None:
        """The grammar of free text in which every call is well-formed; None where the form has no mark for calls."""
        ...

    def reader(self) -> ToolReader: ...


class ToolReader(Protocol):
    """Takes an answer's text as it comes; gives what is text of the answer, and the calls that are complete."""

    def push(self, text: str) -> tuple[str, list[Call]]: ...
    def finish(self) -> tuple[str, list[Call]]:
        """What was held back: a call that is complete now, or text that turned out to be none."""
        ...


def form_of(template: str | None) -> ToolForm:
    """Raises ApiError where the template shows no tools to the model or its form of calls is unknown."""
    if template is None or "tools" not in template:
        raise ApiError("tools: the chat template of these engines does not show tools to the model", param="tools")
    if OPEN in template:
        return TaggedForm()
    if "<|python_tag|>" in template or '"parameters":' in template or "ipython" in template:
        return BareForm()
    raise ApiError("tools: this chat template's form of tool calls is not known here", param="tools")


def tool_guide(body: ChatBody, form: ToolForm) -> Guide | None:
    """The grammar that tool_choice asks for."""
    tools = [tool.function for tool in body.tools or []]
    if isinstance(body.tool_choice, NamedTool):
        return form.required_guide([tool for tool in tools if tool.name == body.tool_choice.function.name])
    if body.tool_choice == "required":
        return form.required_guide(tools)
    return form.offered_guide(tools) if any(tool.strict for tool in tools) else None


class TaggedForm:
    """<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>, as often as the model likes, amid text."""

    arguments_key = "arguments"

    def required_guide(self, tools: list[FunctionTool]) -> Guide:
        schema = json.dumps(_call_schema(tools, self.arguments_key))
        return Guide("ebnf_grammar", f'start: "{OPEN}\\n" call "\\n{CLOSE}"\ncall: %json {schema}\n')

    def offered_guide(self, tools: list[FunctionTool]) -> Guide:
        structures = [
            {
                "begin": f'{OPEN}\n{{"name": {json.dumps(tool.name)}, "{self.arguments_key}": ',
                "schema": tool.parameters or _ANYTHING,
                "end": f"}}\n{CLOSE}",
            }
            for tool in tools
        ]
        return Guide("structural_tag", json.dumps({"structures": structures, "triggers": [OPEN]}))

    def reader(self) -> ToolReader:
        return TaggedReader()


class TaggedReader:
    """Holds back whatever may become a tag."""

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._held += text
        shown: list[str] = []
        calls: list[Call] = []
        while True:
            before, tag, behind = self._held.partition(CLOSE if self._is_inside else OPEN)
            if not tag:
                break
            if not self._is_inside:
                shown.append(before)
            elif (call := _read_call(before, TaggedForm.arguments_key)) is not None:
                calls.append(call)
            else:  # no call between the tags: the client sees what the model wrote
                shown.append(OPEN + before + CLOSE)
            self._held, self._is_inside = behind, not self._is_inside
        if not self._is_inside:
            num_ready = len(self._held) - _num_may_begin(self._held, OPEN)
            shown.append(self._held[:num_ready])
            self._held = self._held[num_ready:]
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[Call]]:
        held, self._held = (OPEN if self._is_inside else "") + self._held, ""
        call = _read_call(held.removeprefix(OPEN), TaggedForm.arguments_key) if self._is_inside else None
        return ("", [call]) if call is not None else (held, [])


class BareForm:
    """{"name": ..., "parameters": {...}} and nothing else, perhaps behind <|python_tag|>."""

    arguments_key = "parameters"

    def required_guide(self, tools: list[FunctionTool]) -> Guide:
        return Guide("json_schema", json.dumps(_call_schema(tools, self.arguments_key)))

    def offered_guide(self, tools: list[FunctionTool]) -> None:
        return None

    def reader(self) -> ToolReader:
        return BareReader()


class BareReader:
    """An answer that begins as a call is held back to its end; any other is text at once."""

    MARKS = ("<|python_tag|>", "{")

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        if self._is_text:
            return text, []
        self._held += text
        start = self._held.lstrip()
        if not start or any(start.startswith(mark) or mark.startswith(start) for mark in self.MARKS):
            return "", []
        self._is_text = True
        shown, self._held = self._held, ""
        return shown, []

    def finish(self) -> tuple[str, list[Call]]:
        held, self._held = self._held, ""
        parts = _json_values(held.strip().removeprefix(self.MARKS[0]))
        calls = [_call_of(part, BareForm.arguments_key) for part in parts]
        found = [call for call in calls if call is not None]
        return ("", found) if found and len(found) == len(calls) else (held, [])


def _call_schema(tools: list[FunctionTool], key: str) -> dict[str, Any]:
    schemas = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: tool.parameters or _ANYTHING},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _read_call(text: str, key: str) -> Call | None:
    try:
        return _call_of(json.loads(text), key)
    except (ValueError, RecursionError):
        return None


def _call_of(value: object, key: str) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(key, value.get("arguments", {}))
    return Call(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _json_values(text: str) -> list[object]:
    """JSON values with semicolons or nothing between; [None] for any other text."""
    decoder, values, place = json.JSONDecoder(), [], 0
    try:
        while place < len(text):
            value, place = decoder.raw_decode(text, place)
            values.append(value)
            while place < len(text) and text[place] in "; \n\t\r":
                place += 1
    except (ValueError, RecursionError):
        return [None]
    return values


def _num_may_begin(text: str, mark: str) -> int:
    """Characters at the end of text with which mark may begin."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
