"""The process that renders chat templates (chat.ChatRenderer): JSON in, JSON out, until its socket is closed.

A template is a program that came with a checkpoint. The sandbox keeps it from files and attributes. The process limits
memory, and the kernel ends it if a call takes too much processor time. It imports the standard library and jinja2
alone, so that it starts quickly.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from datetime import datetime
from functools import cache, lru_cache
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CPU_S = 1.0  # per call; templates take about a millisecond
MAX_MEMORY_BYTES = 1 << 30
MAX_CHARS = 16 << 20  # per rendered prompt


class Refusal(jinja2.TemplateError):
    """The template's own error: it cannot render these messages."""


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training and does not change the prompt."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, but an unsafe attribute is an error instead of an empty text."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise jinja2.exceptions.SecurityError(f"attribute {attribute!r} of {type(obj).__name__!r} is not for templates")


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that could be Python's own attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        names = dict(*args[1:], **kwargs)  # args[0] is self, so that a template may use that name
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def render(
    template: str, special_tokens: dict[str, str], messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str:
    """Returns the prompt up to the assistant's answer. Raises any error that the template causes."""
    parts, num_chars = [], 0
    chunks = compiled(template).generate(
        messages=messages, tools=tools, documents=None, add_generation_prompt=True, **special_tokens
    )
    for chunk in chunks:
        parts.append(chunk)
        num_chars += len(chunk)
        if num_chars > MAX_CHARS:
            raise ValueError(f"it writes more than {MAX_CHARS} characters")
    return "".join(parts)


@lru_cache(maxsize=4)
def compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)


@cache
def environment() -> jinja2.Environment:
    """Returns Jinja as Hugging Face's chat templates expect it."""
    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": Namespace,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # noqa: PLW0108 - the class has attributes
    }
    return made


def answer(call: dict[str, Any]) -> dict[str, str]:
    """Maps {template, special_tokens, messages, tools} to {"text"}, {"refusal"} or {"error"}.

    Messages of null only compile the template.
    """
    try:
        if call["messages"] is None:
            compiled(call["template"])
            return {"text": ""}
        return {"text": render(call["template"], call["special_tokens"], call["messages"], call["tools"])}
    except Refusal as refusal:
        return {"refusal": str(refusal)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:  # a template can raise anything; the client sees it
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process; its parent may have blocked the signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError):
        while True:
            call = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
            reply = json.dumps(answer(json.loads(call))).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(reply)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not hold {name!r}")


def _refuse(message: object) -> None:
    raise Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON; unlike Jinja's filter, it keeps < and >."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    main()
