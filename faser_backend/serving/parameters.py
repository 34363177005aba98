"""config.pbtxt parameters -> typed options.

The names that users of TensorRT-LLM's backend know, and ours. A value left as `${name}` or empty is
unset; parameters that mean nothing here (GPU ids on a CPU) are accepted, others are ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from faser_backend.config import EngineConfig
from faser_backend.core.errors import ConfigError

LOG_FORMATS = ("text", "json")
_UNSET = re.compile(r"\$\{\w+\}")
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}
ENGINE_INTEGERS = ("max_num_seqs", "max_queue_size", "max_prefill_tokens", "num_kv_blocks", "num_threads")
ENGINE_STRINGS = ("policy", "draft", "acceptance", "early_exit", "pipeline")


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What the served model does besides decoding. `engine_dir` None: the demo pair."""

    engine_dir: Path | None
    max_cached_tokens: int | None  # bound on the KV pool, in tokens
    out_of_vocab: Literal["reject", "clamp"] = "reject"
    excludes_input: bool = False
    adds_special_tokens: bool | None = None  # None: as the checkpoint says
    chat_template_file: Path | None = None  # instead of the checkpoint's
    takes_stop_requests: bool = True
    max_text_bytes: int | None = None  # None: as much as may fit into the context
    cancellation_period_s: float = 0.1
    metrics_period_s: float = 0.25


class Parameters:
    """The `parameters` block of a model configuration as Triton hands it over in JSON."""

    def __init__(self, model_config: dict) -> None:
        values = {
            name: entry.get("string_value", "").strip() for name, entry in model_config.get("parameters", {}).items()
        }
        self._values = {name: value for name, value in values.items() if value and not _UNSET.fullmatch(value)}

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def integer(self, name: str, low: int = 0) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < low:
            raise ConfigError(f"parameter {name} = {text!r}: must be an integer of at least {low}")
        return int(text)

    def boolean(self, name: str) -> bool | None:
        text = self.text(name)
        if text is None:
            return None
        if text.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"parameter {name} = {text!r}: must be true or false")
        return text.lower() in _TRUE


def read_engine_config(parameters: Parameters) -> EngineConfig:
    """Raises ConfigError naming the parameter."""
    options: dict[str, object] = {name: parameters.integer(name) for name in ENGINE_INTEGERS}
    options |= {name: parameters.text(name) for name in ENGINE_STRINGS}
    options["admission"] = parameters.text("batch_scheduler_policy")
    options["enable_prefix_reuse"] = parameters.boolean("enable_kv_cache_reuse")
    return EngineConfig.from_options(**{name: value for name, value in options.items() if value is not None})


def read_serving_options(parameters: Parameters) -> ServingOptions:
    """Raises ConfigError naming the parameter."""
    engine_dir = parameters.text("gpt_model_path")
    _check_model_type(parameters.text("gpt_model_type"))
    chat_template = parameters.text("chat_template")
    out_of_vocab = parameters.text("out_of_vocab") or "reject"
    if out_of_vocab not in ("reject", "clamp"):
        raise ConfigError(f"parameter out_of_vocab = {out_of_vocab!r}: must be reject or clamp")
    cancellation_ms = parameters.integer("cancellation_check_period_ms", low=1) or 100
    stats_ms = parameters.integer("stats_check_period_ms", low=1) or 250
    return ServingOptions(
        engine_dir=None if engine_dir is None else Path(engine_dir),
        max_cached_tokens=parameters.integer("max_tokens_in_paged_kv_cache", low=1),
        out_of_vocab="clamp" if out_of_vocab == "clamp" else "reject",
        excludes_input=parameters.boolean("exclude_input_in_output") or False,
        adds_special_tokens=parameters.boolean("add_special_tokens"),
        chat_template_file=None if chat_template is None else Path(chat_template),
        takes_stop_requests=parameters.boolean("stop_requests") is not False,
        max_text_bytes=parameters.integer("max_text_bytes", low=1),
        cancellation_period_s=min(cancellation_ms, 100) / 1e3,
        metrics_period_s=stats_ms / 1e3,
    )


def read_log_format(parameters: Parameters) -> str:
    """Raises ConfigError naming the parameter."""
    log_format = parameters.text("log_format") or "text"
    if log_format not in LOG_FORMATS:
        raise ConfigError(f"parameter log_format = {log_format!r}: must be one of {', '.join(LOG_FORMATS)}")
    return log_format


def _check_model_type(model_type: str | None) -> None:
    """This engine batches in flight and does nothing else; a configuration that asks for more is told so."""
    if model_type is not None and model_type not in ("inflight_batching", "inflight_fused_batching"):
        raise ConfigError(
            f"Invalid gpt_model_type {model_type!r}: must be inflight_batching or inflight_fused_batching"
        )
