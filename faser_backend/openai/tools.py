"""Tool calls: the grammars that make a model write a call, and the parsers that find calls in its text.

Two forms are supported; the chat template decides. Hermes and Qwen write each call between <tool_call> tags. Llama 3
answers with one JSON object, or several with semicolons between. For a template without tools, or with another form, a
system message lists the functions and asks for the first form.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from faser_backend.openai.bodies import ConversationBody, FunctionTool, Tool
from faser_backend.text.answer_stream import num_may_begin
from faser_backend.text.guides import JSON_STYLE

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
class Guide:
    """A grammar for the answer. kind: a value of `guided_decoding_guide_type`."""

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function by the model. arguments: JSON text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ToolForm:
    """The form in which one kind of model writes calls. An object parses one answer as its text arrives."""

    arguments_key: str
    call_rule: str  # of an answer that is one call, in Lark

    @classmethod
    def required_guide(cls, tools: list[FunctionTool], schema: dict[str, Any] | None = None) -> Guide:
        """Returns the grammar of an answer that is one call of one of the tools, or that follows the schema.

        Every schema stays a separate document, so that references in it keep their root.
        """
        rules = [f"start: {cls.call_rule}" + (" | answer" if schema is not None else "")]
        rules.append("call: " + " | ".join(f"call{index}" for index in range(len(tools))))
        for index, tool in enumerate(tools):
            begin = json.dumps(f'{{"name": "{tool.name}", "{cls.arguments_key}": ')
            rules.append(f'call{index}: {begin} arguments{index} "}}"')
            rules.append(_json_rule(f"arguments{index}", _closed(tool.parameters)))
        rules += [_json_rule("answer", schema)] if schema is not None else []
        return Guide("ebnf_grammar", "\n".join(rules))

    @classmethod
    def offered_guide(cls, tools: list[FunctionTool]) -> Guide | None:
        """Returns the grammar of free text with well-formed calls; None if the form does not mark calls."""
        return None

    def push(self, text: str) -> tuple[str, list[FunctionCall]]:
        """Returns the new text of the answer, and the calls that are complete."""
        raise NotImplementedError

    def finish(self) -> tuple[str, list[FunctionCall]]:
        """Returns the text that was held back, or the calls that it makes."""
        raise NotImplementedError


class TaggedForm(ToolForm):
    """Calls as <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>, any number of them between text."""

    arguments_key = "arguments"
    call_rule = f'"{OPEN}\\n" call "\\n{CLOSE}"'

    def __init__(self) -> None:
        self._held = ""  # text that may become a tag, or a call that is not complete
        self._is_inside = False

    @classmethod
    def offered_guide(cls, tools: list[FunctionTool]) -> Guide:
        structures = [
            {
                "begin": f'{OPEN}\n{{"name": {json.dumps(tool.name)}, "{cls.arguments_key}": ',
                "schema": _closed(tool.parameters),
                "end": f"}}\n{CLOSE}",
            }
            for tool in tools
        ]
        return Guide("structural_tag", json.dumps({"structures": structures, "triggers": [OPEN]}))

    def push(self, text: str) -> tuple[str, list[FunctionCall]]:
        self._held += text
        shown: list[str] = []
        calls: list[FunctionCall] = []
        while True:
            before, tag, behind = self._held.partition(CLOSE if self._is_inside else OPEN)
            while tag and self._is_inside and _ends_in_string(before):
                more, tag, behind = behind.partition(CLOSE)
                before += CLOSE + more
            if not tag:
                break
            if not self._is_inside:
                shown.append(before)
            elif (call := self._read_call(before)) is not None:
                calls.append(call)
            else:  # not a call between the tags: the client gets the text
                shown.append(OPEN + before + CLOSE)
            self._held, self._is_inside = behind, not self._is_inside
        if not self._is_inside:
            num_ready = len(self._held) - num_may_begin(self._held, OPEN)
            shown.append(self._held[:num_ready])
            self._held = self._held[num_ready:]
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[FunctionCall]]:
        call = self._read_call(self._held) if self._is_inside else None
        return ("", [call]) if call is not None else ((OPEN if self._is_inside else "") + self._held, [])

    def _read_call(self, text: str) -> FunctionCall | None:
        try:
            return _call_of(json.loads(text), self.arguments_key)
        except (ValueError, RecursionError):
            return None


class BareForm(ToolForm):
    """Calls as {"name": ..., "parameters": {...}} and nothing else, perhaps after <|python_tag|>.

    An answer that begins like a call is held back to its end; any other is text at once.
    """

    arguments_key = "parameters"
    call_rule = "call"
    MARKS = ("<|python_tag|>", "{")

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> tuple[str, list[FunctionCall]]:
        if self._is_text:
            return text, []
        self._held += text
        start = self._held.lstrip()
        if not start or any(start.startswith(mark) or mark.startswith(start) for mark in self.MARKS):
            return "", []
        self._is_text = True
        shown, self._held = self._held, ""
        return shown, []

    def finish(self) -> tuple[str, list[FunctionCall]]:
        values = _json_values(self._held.strip().removeprefix(self.MARKS[0]))
        # A JSON answer may have a name too, but no call lacks arguments.
        keys = {self.arguments_key, "arguments"}
        calls = [_call_of(one, self.arguments_key) for one in values if isinstance(one, dict) and one.keys() & keys]
        found = [call for call in calls if call is not None]
        return ("", found) if found and len(found) == len(values) else (self._held, [])


def form_of(template: str | None) -> type[ToolForm]:
    return BareForm if shows_tools(template) and OPEN not in (template or "") else TaggedForm


def shows_tools(template: str | None) -> bool:
    """Returns whether the template lists tools and writes calls in a supported form."""
    marks = (OPEN, "<|python_tag|>", '"parameters":', "ipython")
    return template is not None and "tools" in template and any(mark in template for mark in marks)


def written_out(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Rewrites a conversation for a template without tools.

    The system message lists the functions, calls become text of the assistant, and results become user messages.
    """
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
            if was_result:  # many templates require alternating roles
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


def answer_guide(body: ConversationBody, form: type[ToolForm] | None) -> Guide | None:
    """Returns the grammar that tool_choice and the answer's format need. form: None if no tools are offered."""
    schema = body.answer_format.answer_schema if body.answer_format else None
    if form is None:
        return None if schema is None else Guide("json_schema", json.dumps(schema))
    tools = [tool.function for tool in body.offered_tools]
    if isinstance(body.tool_choice, Tool):
        return form.required_guide([tool for tool in tools if tool.name == body.tool_choice.function.name])
    if body.tool_choice == "required" or schema is not None:
        return form.required_guide(tools, None if body.tool_choice == "required" else schema)
    return form.offered_guide(tools) if any(tool.strict for tool in tools) else None


class CallFinder:
    """A splitter of one answer's text into text and calls. form: None if no tools are offered."""

    def __init__(self, form: type[ToolForm] | None, *, is_single: bool) -> None:
        self.calls: list[FunctionCall] = []
        self._form = form() if form is not None else None
        self._is_single, self._space = is_single, ""

    def read(self, text: str, *, is_last: bool) -> tuple[str, list[FunctionCall]]:
        """Returns new text and calls. Drops white space at the end beside calls and, if is_single, further calls."""
        if self._form is None:
            return text, []
        text, calls = self._form.push(text)
        if is_last:
            rest, last = self._form.finish()
            text, calls = text + rest, calls + last
        if self._is_single:
            calls = calls[: 1 - len(self.calls)]
        self.calls += calls
        text = self._space + text
        shown = text if is_last and not self.calls else text.rstrip()
        self._space = text[len(shown) :]  # held until text follows
        return shown, calls


def _closed(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the schema of a call's arguments, closed to other properties unless it allows them.

    A small model that may add properties does not stop.
    """
    if not parameters:
        return _ANYTHING
    return ({"additionalProperties": False} if "properties" in parameters else {}) | parameters


def _json_rule(name: str, schema: dict[str, Any]) -> str:
    """Returns a rule for JSON of a schema, in the style of guides that are schemas."""
    return f"{name}: %json {json.dumps(schema | {'x-guidance': JSON_STYLE})}"


def _ends_in_string(text: str) -> bool:
    return text.replace("\\\\", "").replace('\\"', "").count('"') % 2 == 1


def _call_of(value: object, key: str) -> FunctionCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(key, value.get("arguments", {}))
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # 1e999 is a number of JSON's grammar that no client could read back
        return None
    name, text = (each.encode(errors="replace").decode() for each in (value["name"], text))  # no half surrogate pairs
    return FunctionCall(name, text)


def _json_values(text: str) -> list[object]:
    """Returns the JSON values of a text, with semicolons or nothing between; [None] for any other text."""
    decoder, values, position = json.JSONDecoder(), [], 0
    try:
        while position < len(text):
            value, position = decoder.raw_decode(text, position)
            values.append(value)
            while position < len(text) and text[position] in "; \n\t\r":
                position += 1
    except (ValueError, RecursionError):
        return [None]
    return values
