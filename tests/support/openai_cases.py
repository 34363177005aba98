"""The fields of the OpenAI-compatible API, each with a note and a value that uses it.

`python -m tests.support.openai_cases` writes the table of docs/openai.md; test_openai.py sends every row.
"""

from pathlib import Path
from typing import Any, NamedTuple

from faser_backend.openai.bodies import REFUSED, ChatBody, CompletionBody, ResponsesBody
from tests.support.conformance_cases import written

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
FLAT_WEATHER = {"type": "function", **WEATHER["function"]}  # in the format of /v1/responses
COLOUR = {
    "type": "object",
    "properties": {"hue": {"enum": ["red", "blue"]}},
    "required": ["hue"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}


class Field(NamedTuple):
    """A field. value: uses it; note: for the table; beside: other fields that it needs."""

    value: Any
    note: str = "as OpenAI's"
    beside: dict[str, Any] = {}  # noqa: RUF012 - never written to


_SHARED = {
    "model": Field(MODEL, "the served name, an adapter's, or left out"),
    "modalities": Field(["text"], "text only"),
    "temperature": Field(0.5, "default 1"),
    "top_p": Field(0.9),
    "stream": Field(False, "server-sent events"),
    "stream_options": Field({"include_usage": True}, "include_usage, continuous_usage_stats", {"stream": True}),
    "seed": Field(-7, "repeats the answer, whatever else runs; default: a fresh one"),
    "frequency_penalty": Field(0.5),
    "presence_penalty": Field(0.5),
    "top_k": Field(5, "extension: -1 and 0 turn it off"),
    "min_p": Field(0.1, "extension"),
    "repetition_penalty": Field(1.1, "extension"),
    "min_tokens": Field(2, "extension"),
    "ignore_eos": Field(True, "extension: end tokens do not end the answer"),
    "num_draft_tokens": Field(2, "extension: limits speculation; 0 turns it off"),
    "spec_decode_metrics": Field("summary", "extension: `summary` or `detailed`, in `metrics.speculative_decoding`"),
    "return_token_details": Field(True, "extension: chunks mark drafted pieces of text", {"stream": True}),
}
_CHOICES = {
    "n": Field(2, "seeds s, s + 1, ..."),
    "stop": Field(["zz", "qq"], "the text ends before it; `stop_reason` names it"),
    "logit_bias": Field({"5": 1.5}),
}
_TOOLS = {
    "tools": Field([WEATHER], "functions"),
    "tool_choice": Field("required", "none, auto, required or a name, by grammar", {"tools": [WEATHER]}),
    "parallel_tool_calls": Field(False, "false keeps the first call only", {"tools": [WEATHER]}),
}
FIELDS: dict[type, dict[str, Field]] = {
    CompletionBody: {
        "prompt": Field([[5, 6, 7], [8, 9]], "text, token ids, or lists of either"),
        "max_tokens": Field(4, "default 16; 0 with echo returns the prompt alone"),
        **_SHARED,
        **_CHOICES,
        "logprobs": Field(2, "from the target's own distribution"),
        "echo": Field(True, "repeats the prompt, with logprobs if requested; the first is null"),
        "best_of": Field(1, "must equal n"),
    },
    ChatBody: {
        "messages": Field(MESSAGES, "text content; roles system, developer, user, assistant, tool"),
        "max_tokens": Field(4, "default: the rest of the context"),
        "max_completion_tokens": Field(4, "has priority over max_tokens"),
        **_SHARED,
        **_CHOICES,
        "logprobs": Field(True, "from the target's own distribution"),
        "top_logprobs": Field(3, "at most 20", {"logprobs": True}),
        "response_format": Field(_SCHEMA, "text, json_object, json_schema: [structured output](structured-output.md)"),
        **_TOOLS,
        "prediction": Field({"type": "content", "content": "red"}, "verified as the client's own draft"),
    },
    ResponsesBody: {
        "input": Field("Name a colour.", "text, or messages with text, calls and their results"),
        "max_output_tokens": Field(4, "default: the rest of the context"),
        **_SHARED,
        **{name: field._replace(beside={"tools": [FLAT_WEATHER]}) for name, field in _TOOLS.items()},
        "tools": Field([FLAT_WEATHER], "functions"),
        "instructions": Field("Be brief.", "a system message before the input"),
        "text": Field({"format": {"type": "json_schema", "name": "colour", "schema": COLOUR}}, "format"),
        "metadata": Field({"a": "b"}, "returned"),
        "store": Field(True, "nothing is stored"),
    },
}
PATHS = {CompletionBody: "/v1/completions", ChatBody: "/v1/chat/completions", ResponsesBody: "/v1/responses"}
BASE: dict[type, dict[str, Any]] = {
    CompletionBody: {"prompt": "def f", "max_tokens": 4},
    ChatBody: {"messages": MESSAGES, "max_tokens": 4},
    ResponsesBody: {"input": "Name a colour.", "max_output_tokens": 16},
}
REFUSED_VALUE = {"functions": [{"name": "f"}]}  # values that use a refused field; SOME_VALUE by default
SOME_VALUE = "x"


def table_lines() -> list[str]:
    """Returns the table's lines; fields with the same note share a row."""
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
    return ["| fields | endpoints | support |", "|---|---|---|", *lines, ""]


def with_table(docs: str) -> str:
    """Returns the page with the current table."""
    return written(docs, BEGIN, table_lines(), END)


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
