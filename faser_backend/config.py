"""The one configuration of an engine: frozen, validated once, no I/O.

What can be computed (model sizes, context length, end ids) comes from the engine's manifest.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from faser_backend.core.errors import ConfigError

# Medians under the loads of `faser bench` on the demo pair were at 0.95x of `none` or more, with a profile and without;
# those of `fixed:4` at 0.58x or more.
DEFAULT_POLICY = "faser"


class EngineConfig(BaseModel):
    """How an engine schedules, speculates and samples. Make one with `EngineConfig.from_options`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = DEFAULT_POLICY  # see policy/registry.py
    # Who drafts; "auto" is the engine directory's draft model, or n-grams of the text so far where it has none;
    # "model+ngram" takes for each request and step the chain of either that promises more.
    draft: Literal["auto", "model", "ngram", "model+ngram"] = "auto"
    acceptance: Literal["match", "rejection"] = "match"
    # For ablations: "auto" is what the policy decides.
    early_exit: Literal["auto", "on", "off"] = "auto"
    pipeline: Literal["auto", "serial", "run_ahead", "ping_pong"] = "auto"
    max_num_seqs: Annotated[int, Field(ge=1, le=1024)] = 32
    max_queue_size: Annotated[int, Field(ge=0, le=1_000_000)] = 256
    max_prefill_tokens: Annotated[int, Field(ge=1, le=65536)] = 256  # per step, beside the decodes
    num_kv_blocks: Annotated[int, Field(ge=1)] | None = None  # None: from max_num_seqs and free memory
    enable_prefix_reuse: bool = True
    admission: Literal["max_utilization", "guaranteed_no_evict"] = "max_utilization"
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None  # None: all cores of the partition

    @classmethod
    def from_options(cls, **options: object) -> EngineConfig:
        """Validates options given by name. Raises ConfigError with one line per bad field."""
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, e['loc']))} = {e['input']!r}: {e['msg']}" for e in error.errors())
            raise ConfigError("; ".join(lines)) from None
