"""Tool calls: what grammar makes a model write one, and how one is found in its text.

Two forms are known, told apart by the chat template: Hermes's and Qwen's (each call between <tool_call> tags) and
Llama 3's (the answer is one JSON object, or several with semicolons between). A template that shows no tools, or whose
form of calls is not known, is given the first form in words: a system message lists the functions.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

from faser_backend.serving.guides import JSON_STYLE
from faser_backend.serving.openai.fields import ChatBody, FunctionTool, NamedTool, ResponsesBody
from faser_backend.serving.openai.sampling import Guide

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_ANYTHING: dict[str, Any] = {"type": "object"}
_PROMPT = """\
You can call functions. These are the functions, as JSON:
{functions}

To call a function, answer with its name and its arguments in this form, and nothing else:
{open}
{{"name": NAME, "arguments": {{...}}}}
{close}"""


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

    def required_guide(self, tools: list[FunctionTool], schema: dict[str, Any] | None = None) -> Guide:
        """The grammar of an answer that is exactly one call of one of the tools, or of this schema."""
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
    return BareForm() if shows_tools(template) and OPEN not in (template or "") else TaggedForm()


def shows_tools(template: str | None) -> bool:
    """Whether the template lists tools, and writes calls in a form that is known here."""
    marks = (OPEN, "<|python_tag|>", '"parameters":', "ipython")
    return template is not None and "tools" in template and any(mark in template for mark in marks)


def written_out(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: the functions are listed in the system message, calls are
    text of the assistant, and results messages of the user."""
    written: list[dict[str, Any]] = []
    if tools:
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        written.append({"role": "system", "content": _PROMPT.format(functions=functions, open=OPEN, close=CLOSE)})
        if messages[0]["role"] in ("system", "developer"):
            written[0]["content"] = f"{messages[0]['content']}\n\n{written[0]['content']}"
            messages = messages[1:]
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:  # many templates want the roles to alternate
                written[-1]["content"] += f"\n{text}"
            else:
                written.append({"role": "user", "content": text})
            continue
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        texts = [message["content"]] if message["content"] or not calls else []
        texts += [f"{OPEN}\n{call}\n{CLOSE}" for call in calls]
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        written.append(kept | {"content": "\n".join(texts)})
    return written


def answer_guide(body: ChatBody | ResponsesBody, form: ToolForm | None, schema: dict[str, Any] | None) -> Guide | None:
    """The grammar that tool_choice and the format of the answer ask for. schema: of an answer that is no call."""
    if form is None:
        return None if schema is None else Guide("json_schema", json.dumps(schema))
    tools = [tool.function for tool in body.offered_tools]
    if isinstance(body.tool_choice, NamedTool):
        return form.required_guide([tool for tool in tools if tool.name == body.tool_choice.function.name])
    if body.tool_choice == "required" or schema is not None:
        return form.required_guide(tools, None if body.tool_choice == "required" else schema)
    return form.offered_guide(tools) if any(tool.strict for tool in tools) else None


class CallFinder:
    """Splits one answer's text, as it comes, into text and calls. form: None where no tools are offered."""

    def __init__(self, form: ToolForm | None, *, is_single: bool) -> None:
        self.calls: list[Call] = []
        self._reader = form.reader() if form is not None else None
        self._is_single = is_single

    def read(self, text: str, *, is_last: bool) -> tuple[str, list[Call]]:
        """What is new. Behind a call, space is no text; if is_single, neither are further calls calls."""
        if self._reader is None:
            return text, []
        text, calls = self._reader.push(text)
        if is_last:
            rest, last = self._reader.finish()
            text, calls = text + rest, calls + last
        if self._is_single:
            calls = calls[: 1 - len(self.calls)]
        self.calls += calls
        return ("" if self.calls and not text.strip() else text), calls


class TaggedForm:
    """<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>, as often as the model likes, amid text."""

    arguments_key = "arguments"

    def required_guide(self, tools: list[FunctionTool], schema: dict[str, Any] | None = None) -> Guide:
        return _call_guide(f'"{OPEN}\\n" call "\\n{CLOSE}"', tools, self.arguments_key, schema)

    def offered_guide(self, tools: list[FunctionTool]) -> Guide:
        structures = [
            {
                "begin": f'{OPEN}\n{{"name": {json.dumps(tool.name)}, "{self.arguments_key}": ',
                "schema": _closed(tool.parameters),
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

    def required_guide(self, tools: list[FunctionTool], schema: dict[str, Any] | None = None) -> Guide:
        return _call_guide("call", tools, self.arguments_key, schema)

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


def _call_guide(start: str, tools: list[FunctionTool], key: str, schema: dict[str, Any] | None) -> Guide:
    """start: what an answer with a call is, in Lark. Every schema is a document of its own, so that references in it
    have their root."""
    rules = [f"start: {start}" + (" | answer" if schema is not None else "")]
    rules.append("call: " + " | ".join(f"call{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        begin = json.dumps(f'{{"name": "{tool.name}", "{key}": ')
        rules += [
            f'call{index}: {begin} arguments{index} "}}"',
            _json_rule(f"arguments{index}", _closed(tool.parameters)),
        ]
    return Guide("ebnf_grammar", "\n".join(rules + ([_json_rule("answer", schema)] if schema is not None else [])))


def _closed(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a call's arguments. Those that it names, and no others unless it says so: a small model that may
    add some does not end."""
    if not parameters:
        return _ANYTHING
    return ({"additionalProperties": False} if "properties" in parameters else {}) | parameters


def _json_rule(name: str, schema: dict[str, Any]) -> str:
    """Schemas within a grammar are not written in the style of guides that are schemas: it is told here."""
    return f"{name}: %json {json.dumps(schema | {'x-guidance': JSON_STYLE})}"


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
