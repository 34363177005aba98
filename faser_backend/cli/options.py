"""How commands take options from tables (core/config.py), and how help shows them; options that commands share."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from faser_backend.core.config import CAPACITY, SPECULATION, Option, OptionTable, option
from faser_backend.core.errors import ConfigError
from faser_backend.files import read_text
from faser_backend.serving.parameters import ACCESS, ARGUMENTS, CONTRACT, OPENAI, SERVER, ServingOptions

POLICIES = "none, fixed:K, goodput, survival, gp-lcb, faser, file:PATH"  # policy.registry would load numpy
SAMPLING, STORAGE, TENSORRT = "Sampling", "Formats of weights and caches", "TensorRT"
# In the order of help:
SECTIONS = [ARGUMENTS, "Options", SAMPLING, SPECULATION, CAPACITY, STORAGE, TENSORRT, SERVER, OPENAI, ACCESS, CONTRACT]

# Options that several commands have.
JSON = Option("Print JSON.", flags="--json")
SYSTEM = Option("Begin the conversation with this system message.")
CHAT = Option("Apply the chat template to prompts.", flags="--chat")
TARGET = Option("Read the target from this checkpoint directory or GGUF file.")
OUTPUT = Option("Write the results into this directory.")
MAX_CONTEXT = Option("Limit prompt plus output to this many tokens.")
SEED = Option("Set the random seed.")


class SamplingOptions(OptionTable):
    """How `faser generate` and `faser chat` draw tokens."""

    max_tokens: int = option(64, "Generate at most this many tokens.", SAMPLING)
    temperature: float = option(0.0, "Sample at this temperature; 0 decodes greedily.", SAMPLING)
    top_k: int = option(0, "Sample among this many best tokens; 0: all.", SAMPLING)
    top_p: float = option(1.0, "Sample within this probability mass; 1: all.", SAMPLING)
    seed: int | None = option(None, SEED, section=SAMPLING, unset="a fresh one")
    stop: list[str] = option([], "Stop after this text; repeatable.", SAMPLING)


class DoctorOptions(OptionTable):
    """The options of `faser doctor` alone."""

    is_json: bool = option(False, JSON)
    engine_dir: Path | None = option(None, ServingOptions.options()["engine_dir"], unset="none: report on the machine")
    gpu_gib: float | None = option(None, "Assume a GPU of this many GiB.", unset="the GPU present", ge=1, le=1e6)


class ProfileOptions(OptionTable):
    """The options of `faser profile`."""

    is_quick: bool = option(False, "Measure briefly, with larger errors.", flags="--quick")
    prompts: Path | None = option(
        None, "Read prompts from this JSON-lines or .txt file.", unset="the target's own text"
    )
    budget_s: float | None = option(None, "Take about this many seconds, by measuring less.", unset="no limit")


def takes(**tables: tuple[type[OptionTable], str] | type[OptionTable]) -> Callable[[Callable[..., None]], Any]:
    """Replaces each of these parameters of a command by options of a table: all, or those named.

    The command is called with an instance that holds the given values. `name:other` renames an option; of options with
    one name, the first table has it. The result's `options` are the declarations, by parameter.
    """
    chosen, taken = {}, set()
    for group, given in tables.items():
        table, options = _chosen(*given) if isinstance(given, tuple) else _chosen(given)
        chosen[group] = table, {name: each for name, each in options.items() if each.name not in taken}
        taken |= {each.name for each in options.values()}

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

        with_tables.__dict__["options"] = {
            each.name: table.options()[name] for table, options in chosen.values() for name, each in options.items()
        }
        with_tables.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        with_tables.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_tables

    return decorate


def _chosen(table: type[OptionTable], names: str = "") -> tuple[type[OptionTable], dict[str, inspect.Parameter]]:
    """Returns the table, and its options as typer's parameters by their names in the table."""
    known = {name: option for name, option in table.options().items() if option.help}
    found = {}
    for name, _, other in (each.partition(":") for each in names.split() or known):
        field, option = table.model_fields[name], known[name]
        default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        shown: dict[str, Any] = {
            "help": option.help,
            "show_default": not field.is_required() and (option.unset or default not in (None, [])),
            "rich_help_panel": option.section,
            "metavar": f"<{option.values.format(policies=POLICIES.replace(', ', '|'))}>" if option.values else None,
        }
        given = typer.Argument(**shown) if option.section == ARGUMENTS else typer.Option(*option.flags.split(), **shown)
        found[name] = inspect.Parameter(
            other or name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[field.annotation, given],
        )
    return table, found


class PanelCommand(TyperCommand):
    """A command whose help has a section per panel and cuts no name. The file of --config, if any, gives defaults."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = self.make_parser(ctx).parse_args(list(args))[0]
        if file := given.get("config"):
            ctx.default_map = _read_defaults(Path(file), self.params)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:  # names the option alone
            name, defaults = getattr(error.param, "name", ""), ctx.default_map or {}
            if (value := given.get(name)) is not None or name in defaults:  # it is not missing
                value, where = (defaults[name], f" in {file}") if value is None else (value, "")
                error.message = f"{value!r}{where}: {error.message}"
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in SECTIONS}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                other = "Options" if param.param_type_name == "option" else "Arguments"
                sections[getattr(param, "rich_help_panel", None) or other].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _read_defaults(path: Path, params: list[Any]) -> dict[str, Any]:
    """Returns the options in a TOML or YAML file by their parameters. Raises ConfigError with the key."""
    import yaml

    text, found = read_text(path), {}
    try:  # texts, as on a command line: to YAML, `off` were a truth value
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, yaml.BaseLoader) or {}
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {', '.join(str(error).splitlines())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    known = {flag.strip("-").replace("-", "_"): param for param in params for flag in param.opts if flag != "--config"}
    for key, value in content.items() if isinstance(content, dict) else [(f"{content}"[:80], "")]:
        param = known.get(key.replace("-", "_"))
        if param is None:
            raise ConfigError(f"{path}: {key} is no option of the command")
        if isinstance(value, dict) or isinstance(value, list) != getattr(param, "multiple", False):
            raise ConfigError(f"{path}: {key} = {value!r}: must be one value, or a list if the option is repeatable")
        found[param.name] = [str(each) for each in value] if isinstance(value, list) else str(value)
    return found


def parse_integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option} = {text!r}: must be integers separated by commas") from None
