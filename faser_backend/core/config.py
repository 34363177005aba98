"""The options: name, type, default, help and place of each, declared once; and those of an engine, its configuration.

A table of options is a frozen class, validated once, no I/O. From it come the command line (cli_options.py),
config.pbtxt and docs/cli.md. What can be computed (model sizes, context length) comes from the engine's manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from faser_backend.core.errors import ConfigError

# Medians under the loads of `faser bench` on the demo pair were at 0.95x of `none` or more, with a profile and without;
# those of `fixed:4` at 0.58x or more.
DEFAULT_POLICY = "faser"
SPECULATION, CAPACITY = "Speculation", "Capacity"  # sections of help


@dataclass(frozen=True, slots=True)
class Option:
    """How users give a field of a table; its name, type and default are the field's own."""

    help: str = ""  # on the command line; "": no option of it
    section: str = "Options"  # of that help
    flags: str = ""  # where the name does not say them
    shown_default: str = ""  # in place of None
    parameter: str = ""  # key in config.pbtxt, where it is not the name


class OptionTable(BaseModel):
    """A table of options. Make one with `from_options` or `from_parameters`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def from_options(cls, **options: object) -> Self:
        """Validates options given by name. Raises ConfigError with the name, the value and the limit of bad ones."""
        return cls._validated(options, {})

    @classmethod
    def from_parameters(cls, texts: Mapping[str, str]) -> Self:
        """Reads its own of all parameters that config.pbtxt gives. Raises ConfigError as from_options, with keys."""
        keys = cls.keys()
        return cls._validated({name: texts[key] for name, key in keys.items() if key in texts}, keys)

    @classmethod
    def _validated(cls, options: Mapping[str, object], shown: Mapping[str, str]) -> Self:
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            places = [[shown.get(str(part), str(part)) for part in e["loc"]] for e in error.errors()]
            lines = (f"{'.'.join(p)} = {e['input']!r}: {e['msg']}" for p, e in zip(places, error.errors(), strict=True))
            raise ConfigError("; ".join(lines)) from None

    def as_parameters(self) -> dict[str, str]:
        """Returns what was given, as it is to stand in config.pbtxt, by its keys. None is unset there."""
        values = {key: getattr(self, name) for name, key in self.keys().items() if name in self.model_fields_set}
        return {
            key: str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in values.items()
            if value is not None
        }

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Returns the keys in config.pbtxt, by name."""
        return {name: option.parameter or name for name, option in cls.options().items()}

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Returns how users give the fields, by name."""
        return {
            name: next((each for each in field.metadata if isinstance(each, Option)), Option())
            for name, field in cls.model_fields.items()
        }


class EngineConfig(OptionTable):
    """How an engine schedules, speculates and samples."""

    policy: Annotated[str, Option("What decides how much is drafted: {policies}.", SPECULATION)] = DEFAULT_POLICY
    # "auto" is the engine directory's draft model, or n-grams of the text so far where it has none; "model+ngram" takes
    # for each request and step the chain of either that promises more.
    draft: Annotated[
        Literal["auto", "model", "ngram", "model+ngram"],
        Option("Who drafts. Auto: the draft model where there is one.", SPECULATION),
    ] = "auto"
    acceptance: Annotated[Literal["match", "rejection"], Option("How drafted tokens are accepted.", SPECULATION)] = (
        "match"
    )
    # For ablations.
    early_exit: Annotated[Literal["auto", "on", "off"], Option("Auto: as the policy decides.", SPECULATION)] = "auto"
    pipeline: Annotated[
        Literal["auto", "serial", "run_ahead", "ping_pong"], Option("Auto: as the policy decides.", SPECULATION)
    ] = "auto"
    max_num_seqs: Annotated[int, Field(ge=1, le=1024), Option("Requests that decode side by side.", CAPACITY)] = 32
    max_queue_size: Annotated[
        int, Field(ge=0, le=1_000_000), Option("Requests that may wait; 0 is unbounded.", CAPACITY)
    ] = 256
    max_prefill_tokens: Annotated[int, Field(ge=1, le=65536)] = 256  # per step, beside the decodes
    num_kv_blocks: Annotated[
        int | None, Field(ge=1), Option("KV blocks.", CAPACITY, shown_default="from free memory")
    ] = None
    enable_prefix_reuse: Annotated[
        bool,
        Option(
            "Share the KV blocks of equal prompt beginnings.",
            CAPACITY,
            "--prefix-reuse/--no-prefix-reuse",
            parameter="enable_kv_cache_reuse",
        ),
    ] = True
    admission: Annotated[
        Literal["max_utilization", "guaranteed_no_evict"],
        Option("When waiting requests may start.", CAPACITY, parameter="batch_scheduler_policy"),
    ] = "max_utilization"
    num_threads: Annotated[
        int | None, Field(ge=1, le=1024), Option("CPU threads of the engine.", CAPACITY, shown_default="all cores")
    ] = None  # those of the partition
