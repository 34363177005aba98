"""Tables of options, and the table of an engine's options.

A table is a frozen class: each field declares the name, type, default and help of one option. The command line
(cli/options.py), config.pbtxt (triton/model_configs.py) and docs/cli.md follow from the tables. Several tables may have
an option in common; they then share its `Option`. Model sizes and the context length come from the engine's manifest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from faser_backend.core.errors import ConfigError

# Medians under the loads of `faser bench` on the demo pair were at 0.95x of `none` or more, with a profile and without;
# those of `fixed:4` at 0.58x or more.
DEFAULT_POLICY = "faser"
MAX_NUM_SEQS = 1024
MAX_LORA_RANK = 1024
SPECULATION, CAPACITY = "Speculation", "Capacity"  # sections of help
DraftSource = Literal["auto", "model", "ngram", "model+ngram"]


@dataclass(frozen=True, slots=True)
class Option:
    """How users give one field of a table. Name, type and default are the field's own."""

    help: str = ""  # on the command line; "": only a config.pbtxt gives it
    section: str = "Options"  # of the command's help
    flags: str = ""  # if they differ from the name
    values: str = ""  # of a text, shown instead of its type
    unset: str = ""  # shown as default instead of None
    parameter: str = ""  # key in config.pbtxt, if it differs from the name


def option(default: Any, given: Option | str, section: str = "", *, ge: Any = None, le: Any = None, **more: str) -> Any:
    """Declares a field of a table. given: its help, or an Option that several tables have. more: fields of Option."""
    shared = Option(given) if isinstance(given, str) else given
    extra: dict[str, Any] = {"option": replace(shared, section=section or shared.section, **more)}
    return Field(default, ge=ge, le=le, json_schema_extra=extra)


def _with_absolute(given: Any) -> list[str]:
    pairs = [str(text).partition("=") for text in (given.splitlines() if isinstance(given, str) else given)]
    if not all(name and directory for name, _, directory in pairs) or len({pair[0] for pair in pairs}) < len(pairs):
        raise ConfigError(f"lora = {given!r}: must be NAME=DIR, with each NAME once")
    return [f"{name}={Path(directory).absolute()}" for name, _, directory in pairs]


# Texts NAME=DIR, one per line of a config.pbtxt. Directories become absolute.
NamedDirectories = Annotated[list[str], BeforeValidator(_with_absolute)]


def _with_absolute_file(policy: str) -> str:
    return f"file:{Path(policy.removeprefix('file:')).absolute()}" if policy.startswith("file:") else policy


def _as_parameter(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


class OptionTable(BaseModel):
    """A table of options. Make one with `from_options` or `from_parameters`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def from_options(cls, **options: object) -> Self:
        """Validates options given by name. Raises ConfigError with the name, value and limit of each bad one."""
        return cls._validated(options, {})

    @classmethod
    def from_parameters(cls, texts: Mapping[str, str]) -> Self:
        """Reads this table's options from the parameters of a config.pbtxt. Raises ConfigError with their keys."""
        keys = cls.keys()
        return cls._validated({name: texts[key] for name, key in keys.items() if key in texts}, keys)

    @classmethod
    def _validated(cls, options: Mapping[str, object], shown: Mapping[str, str]) -> Self:
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            names = [[shown.get(str(part), str(part)) for part in each["loc"]] for each in error.errors()]
            lines = (f"{'.'.join(n)} = {e['input']!r}: {e['msg']}" for n, e in zip(names, error.errors(), strict=True))
            raise ConfigError("; ".join(lines)) from None

    def as_parameters(self) -> dict[str, str]:
        """Returns the options that were given, as texts by their keys in config.pbtxt. None is left out."""
        values = {key: getattr(self, name) for name, key in self.keys().items() if name in self.model_fields_set}
        return {key: _as_parameter(value) for key, value in values.items() if value is not None}

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Returns the keys in config.pbtxt, by name."""
        return {name: option.parameter or name for name, option in cls.options().items()}

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Returns how users give each field, by name."""
        extras: dict[str, Any] = {name: field.json_schema_extra or {} for name, field in cls.model_fields.items()}
        return {name: extra.get("option", Option()) for name, extra in extras.items()}


class EngineConfig(OptionTable):
    """How an engine schedules, speculates and samples."""

    policy: Annotated[str, AfterValidator(_with_absolute_file)] = option(
        DEFAULT_POLICY, "Choose how draft lengths are decided.", SPECULATION, values="{policies}"
    )
    # "auto": the engine directory's draft model, else n-grams of the text so far. "model+ngram": for each request and
    # step, the chain that promises more.
    draft: DraftSource = option("auto", "Choose what drafts; auto prefers the draft model.", SPECULATION)
    acceptance: Literal["match", "rejection"] = option(
        "match", "Choose the rule that accepts drafted tokens.", SPECULATION
    )
    # For ablations.
    early_exit: Literal["auto", "on", "off"] = option(
        "auto", "Control early exits; auto follows the policy.", SPECULATION
    )
    pipeline: Literal["auto", "serial", "run_ahead", "ping_pong"] = option(
        "auto", "Choose how drafting overlaps verification; auto follows the policy.", SPECULATION
    )
    lora: NamedDirectories = option([], "Serve the LoRA adapter in DIR as NAME; repeatable.", values="NAME=DIR")
    max_lora_rank: int = Field(default=64, ge=1, le=MAX_LORA_RANK)  # adapters of a higher rank are refused
    # Memory of adapters that requests send; 0 refuses them.
    lora_cache_bytes: int = option(1 << 30, Option(parameter="lora_cache_host_memory_bytes"), ge=0)
    max_num_seqs: int = option(32, "Decode at most this many requests together.", CAPACITY, ge=1, le=MAX_NUM_SEQS)
    max_queue_size: int = option(
        256, "Queue at most this many requests; 0 removes the limit.", CAPACITY, ge=0, le=1_000_000
    )
    max_prefill_tokens: int = Field(default=256, ge=1, le=65536)  # per step; GPUs' default is in runtime_spec.py
    max_gap_ms: float = option(250.0, "Limit gaps between tokens that prompts cause; 0: no limit.", CAPACITY, ge=0)
    num_kv_blocks: int | None = option(None, "Set the number of KV blocks.", CAPACITY, unset="from free memory", ge=1)
    enable_prefix_reuse: bool = option(
        True,
        "Share the KV blocks of equal prompt prefixes.",
        CAPACITY,
        flags="--prefix-reuse/--no-prefix-reuse",
        parameter="enable_kv_cache_reuse",
    )
    admission: Literal["max_utilization", "guaranteed_no_evict"] = option(
        "max_utilization", "Choose when waiting requests may start.", CAPACITY, parameter="batch_scheduler_policy"
    )
    num_threads: int | None = option(
        None, "Use this many CPU threads.", CAPACITY, unset="allowed cores", ge=1, le=1024
    )  # None: the cores of the partition
    # quick: only files whose time stamp is not the one in the manifest, as after a copy, are hashed.
    verify: Literal["quick", "full"] = option("quick", "Verify weights by size and time, or by hash.", CAPACITY)

    @property
    def adapters(self) -> dict[str, Path]:
        """The directories of LoRA adapters, by name."""
        pairs = (text.partition("=") for text in self.lora)
        return {name: Path(os.fsdecode(directory.encode())) for name, _, directory in pairs}  # see given_parameters
