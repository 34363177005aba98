"""How commands of the `faser` command line take options from the tables (config.py), and how help shows them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from faser_backend.core.config import Option, OptionTable
from faser_backend.core.errors import ConfigError

# As policy.registry has them, which takes numpy to load: who asks for help does without.
POLICIES = "none, fixed:K, tree:N, goodput, survival, gp-lcb, faser, file:PATH"
SAMPLING, STORAGE, TENSORRT = "Sampling", "How weights and caches are stored", "TensorRT"  # sections of help


class SamplingOptions(OptionTable):
    """How `faser generate` and `faser chat` draw tokens."""

    max_tokens: Annotated[int, Option("Tokens to generate.", SAMPLING)] = 64
    temperature: Annotated[float, Option("0 decodes greedily.", SAMPLING)] = 0.0
    top_k: Annotated[int, Option("0 is off.", SAMPLING)] = 0
    top_p: Annotated[float, Option("1 is off.", SAMPLING)] = 1.0
    seed: Annotated[int | None, Option("Default: a fresh one.", SAMPLING)] = None
    stop: Annotated[list[str], Option("Text to stop after; may be given several times.", SAMPLING)] = []  # noqa: RUF012


def takes(**tables: tuple[type[OptionTable], str] | type[OptionTable]) -> Callable[[Callable[..., None]], Any]:
    """Replaces each of these parameters of a command by options of a table, all or those that are named.

    The command is called with an instance that holds what was given. `name:other` gives an option another name.
    """
    chosen = {group: _chosen(*table) if isinstance(table, tuple) else _chosen(table) for group, table in tables.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [
            option
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            for option in (chosen[parameter.name][1].values() if parameter.name in chosen else [parameter])
        ]

        @wraps(command)
        def with_tables(**given: Any) -> None:
            for group, (table, options) in chosen.items():
                given[group] = table.from_options(**{name: given.pop(each.name) for name, each in options.items()})
            command(**given)

        with_tables.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        with_tables.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_tables

    return decorate


def _chosen(table: type[OptionTable], names: str = "") -> tuple[type[OptionTable], dict[str, inspect.Parameter]]:
    """The table, and for typer its options by their names in the table."""
    known = {name: option for name, option in table.options().items() if option.help}
    found = {}
    for name, _, other in (each.partition(":") for each in names.split() or known):
        field, option = table.model_fields[name], known[name]
        default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        shown = option.shown_default or default not in (None, [])
        help_text = option.help.replace("{policies}", POLICIES)
        given = typer.Option(*option.flags.split(), help=help_text, show_default=shown, rich_help_panel=option.section)
        kind = inspect.Parameter.KEYWORD_ONLY
        annotation = Annotated[field.annotation, given]
        found[name] = inspect.Parameter(other or name, kind, default=default, annotation=annotation)
    return table, found


class PanelCommand(TyperCommand):
    """A command whose help has a section per panel. No name is cut, however narrow the terminal is."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                other = "Options" if param.param_type_name == "option" else "Arguments"
                sections.setdefault(getattr(param, "rich_help_panel", None) or other, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def parse_integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option} = {text!r}: must be integers separated by commas") from None


def print_steps() -> Callable[[str, int, int], None]:
    """Prints the first report of each step of a build."""
    last_done = -1

    def report(what: str, done: int, total: int) -> None:
        nonlocal last_done
        if done != last_done:
            last_done = done
            print(f"[{done}/{total}] {what}", file=sys.stderr)

    return report
