"""Every field of the OpenAI-compatible API: what it is here, and a request that uses it.

docs/openai.md has the table (`python -m tests.support.openai_cases`); test_openai.py asks every row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from faser_backend.openai.bodies import REFUSED, ChatBody, CompletionBody, ResponsesBody

DOCS = Path(__file__).parents[2] / "docs" / "openai.md"
BEGIN, END = "<!-- fields: written by tests/support/openai_cases.py -->", "<!-- end of fields -->"
MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "Name a colour."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FLAT_WEATHER = {"type": "function", **WEATHER["function"]}  # as /v1/responses has it
COLOUR = {
    "type": "object",
    "properties": {"hue": {"enum": ["red", "blue"]}},
    "required": ["hue"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}


class Field(NamedTuple):
    """value: one that uses the field; note: for the table; beside: what has to come with it."""

    value: Any
    note: str = "as OpenAI's"
    beside: dict[str, Any] = {}  # noqa: RUF012 - never written to


_SHARED = {
    "model": Field(MODEL, "must be the served name; may be left out"),
    "modalities": Field(["text"], "text only"),
    "temperature": Field(0.5, "1 unless given"),
    "top_p": Field(0.9),
    "stream": Field(False, "server-sent events"),
    "stream_options": Field({"include_usage": True}, "include_usage, continuous_usage_stats", {"stream": True}),
    "seed": Field(7, "the same answer whatever else runs; a fresh one unless given"),
    "frequency_penalty": Field(0.5),
    "presence_penalty": Field(0.5),
    "top_k": Field(5, "extension: -1 and 0 are off"),
    "min_p": Field(0.1, "extension"),
    "repetition_penalty": Field(1.1, "extension"),
    "min_tokens": Field(2, "extension"),
    "ignore_eos": Field(True, "extension: end tokens do not end the answer"),
    "num_draft_tokens": Field(2, "extension: a cap on speculation; 0 opts out"),
    "spec_decode_metrics": Field("summary", "extension: `metrics.speculative_decoding` of the answer, or `detailed`"),
    "return_token_details": Field(True, "extension: chunks tell which pieces of text were drafted", {"stream": True}),
}
_CHOICES = {
    "n": Field(2, "seeds s, s + 1, ..."),
    "stop": Field(["zz", "qq"], "the text ends before it; `stop_reason` tells which"),
    "logit_bias": Field({"5": 1.5}),
}
_TOOLS = {
    "tools": Field([WEATHER], "functions"),
    "tool_choice": Field("required", "none, auto, required or a name, by grammar", {"tools": [WEATHER]}),
    "parallel_tool_calls": Field(False, "false keeps the first call alone", {"tools": [WEATHER]}),
}
FIELDS: dict[type, dict[str, Field]] = {
    CompletionBody: {
        "prompt": Field([[5, 6, 7], [8, 9]], "text, token ids, or lists of either"),
        "max_tokens": Field(4, "16 unless given; 0 with echo gives the prompt alone"),
        **_SHARED,
        **_CHOICES,
        "logprobs": Field(2, "of the target's own distribution"),
        "echo": Field(True, "with logprobs: those of the prompt's tokens too, the first of which is null"),
        "best_of": Field(1, "must equal n"),
    },
    ChatBody: {
        "messages": Field(MESSAGES, "text content; roles system, developer, user, assistant, tool"),
        "max_tokens": Field(4, "the rest of the context unless given"),
        "max_completion_tokens": Field(4, "goes before max_tokens"),
        **_SHARED,
        **_CHOICES,
        "logprobs": Field(True, "of the target's own distribution"),
        "top_logprobs": Field(3, "at most 20", {"logprobs": True}),
        "response_format": Field(_SCHEMA, "text, json_object, json_schema: [structured output](structured-output.md)"),
        **_TOOLS,
        "prediction": Field({"type": "content", "content": "red"}, "verified as the client's own draft"),
    },
    ResponsesBody: {
        "input": Field("Name a colour.", "text, or messages of text, calls and their results"),
        "max_output_tokens": Field(4, "the rest of the context unless given"),
        **_SHARED,
        **{name: field._replace(beside={"tools": [FLAT_WEATHER]}) for name, field in _TOOLS.items()},
        "tools": Field([FLAT_WEATHER], "functions"),
        "instructions": Field("Be brief.", "a system message before the input"),
        "text": Field({"format": {"type": "json_schema", "name": "colour", "schema": COLOUR}}, "format"),
        "metadata": Field({"a": "b"}, "repeated"),
        "store": Field(True, "nothing is stored"),
    },
}
PATHS = {CompletionBody: "/v1/completions", ChatBody: "/v1/chat/completions", ResponsesBody: "/v1/responses"}
BASE: dict[type, dict[str, Any]] = {
    CompletionBody: {"prompt": "def f", "max_tokens": 4},
    ChatBody: {"messages": MESSAGES, "max_tokens": 4},
    ResponsesBody: {"input": "Name a colour.", "max_output_tokens": 16},
}
REFUSED_VALUE = {"functions": [{"name": "f"}]}  # what uses a refused field; else this
SOME_VALUE = "x"


def table_lines() -> list[str]:
    """Fields that are alike share a row."""
    where: dict[tuple[str, str], list[str]] = {}  # the field as shown, and its note: the paths
    for body, fields in FIELDS.items():
        shown = [(f"`{name}`", field.note) for name, field in fields.items()]
        shown += [(f"`{name}` ({meaning})", "refused") for name, meaning in REFUSED[body].items()]
        for row in shown:
            where.setdefault(row, []).append(PATHS[body].removeprefix("/v1/").partition("/")[0])
    rows: dict[tuple[str, str], list[str]] = {}
    for (field, note), paths in where.items():
        rows.setdefault(("all" if len(paths) == len(PATHS) else ", ".join(paths), note), []).append(field)
    shared_first = sorted(rows.items(), key=lambda row: row[0][0] != "all")
    lines = [f"| {', '.join(fields)} | {paths} | {note} |" for (paths, note), fields in shared_first]
    return ["| fields | of | here |", "|---|---|---|", *lines, ""]


def written(docs: str) -> str:
    """The page with the tables as they are now."""
    before, _, rest = docs.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n" + "\n".join(table_lines()) + f"{END}{after}"


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
