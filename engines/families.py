"""Reads the spec of a model from its config.json. One small adapter per family; all that follows is shared.

An adapter returns the fields in which a family differs from Llama: biases, norms of queries and keys, experts. Variants
that the decoder cannot compute are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faser_backend.core.model import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    ROPE_SCALINGS,
    ModelSpec,
    RopeScaling,
)
from faser_backend.engines.checkpoint import ConfigFields

ROPE_FIELDS = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
}  # fmt: skip


def read_spec(fields: ConfigFields) -> ModelSpec:
    """Returns dimensions and variants of a model. Raises CheckpointError if it cannot be built."""
    family = fields.choice("model_type", FAMILIES)
    fields.must_be("hidden_act", "silu")
    _refuse_windows(fields)
    spec = ModelSpec(**(_dimensions(fields) | _rotary(fields) | FAMILIES[family](fields)), family=family)
    if spec.num_heads % spec.num_kv_heads:
        raise fields.error("num_key_value_heads", spec.num_kv_heads, f"must divide {spec.num_heads} attention heads")
    if spec.head_dim % 2:
        raise fields.error("head_dim", spec.head_dim, "must be even")
    return spec


def _dimensions(fields: ConfigFields) -> dict[str, Any]:
    hidden_size = fields.count("hidden_size", MAX_WIDTH)
    num_heads = fields.count("num_attention_heads", MAX_HEADS)
    if fields.values.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("hidden_size", hidden_size, f"must be a multiple of {num_heads} attention heads")
    vocab_size = fields.count("vocab_size", MAX_VOCABULARY)
    return {
        "num_layers": fields.count("num_hidden_layers", MAX_LAYERS),
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": fields.count("num_key_value_heads", MAX_HEADS, default=num_heads),
        "head_dim": fields.count("head_dim", MAX_WIDTH // num_heads, default=hidden_size // num_heads),
        "intermediate_size": fields.count("intermediate_size", MAX_WIDTH),
        "vocab_size": vocab_size,
        "padded_vocab_size": vocab_size,
        "max_context": fields.count("max_position_embeddings", MAX_CONTEXT),
        "rms_eps": fields.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }


def _rotary(fields: ConfigFields) -> dict[str, Any]:
    """Reads rotary settings: newer configs have `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    newer, older = (fields.section(name).values for name in ("rope_parameters", "rope_scaling"))
    if newer and newer | older != newer:
        raise fields.error("rope_scaling", older, f"must agree with rope_parameters = {newer}")
    rope = fields.section("rope_parameters" if newer else "rope_scaling")
    unknown = sorted(set(rope.values) - ROPE_FIELDS)
    if unknown:
        raise rope.error(unknown[0], rope.values[unknown[0]], "unknown field: its effect on positions is not known")
    for holder in (rope, fields):
        if holder.values.get("partial_rotary_factor") not in (None, 1):
            raise fields.error("partial_rotary_factor", holder.values["partial_rotary_factor"], "must be 1")
    theta = (rope if rope.values.get("rope_theta") is not None else fields).number("rope_theta", 1.0, 1e12, 10000.0)
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind not in ROPE_SCALINGS:
        raise fields.error("rope_type", kind, f"must be one of default, {', '.join(ROPE_SCALINGS)}")
    factor = rope.number("factor", 1.0, 1e6)
    if kind == "linear":
        return {"rope_theta": theta, "rope_scaling": RopeScaling("linear", factor)}
    low, high = (rope.number(f"{end}_freq_factor", 1e-6, 1e6) for end in ("low", "high"))
    if low >= high:
        raise fields.error("low_freq_factor", low, f"must be below high_freq_factor = {high}")
    pretrained = rope.count("original_max_position_embeddings", MAX_CONTEXT)
    return {"rope_theta": theta, "rope_scaling": RopeScaling("llama3", factor, low, high, pretrained)}


def _refuse_windows(fields: ConfigFields) -> None:
    """Refuses sliding windows, unless they are disabled, as in Qwen's configs: use_sliding_window = false."""
    if fields.values.get("model_type") == "mistral":
        fields.must_be("sliding_window")
        if "sliding_window" not in fields.values and fields.count("max_position_embeddings", MAX_CONTEXT) > 4096:
            raise fields.error("sliding_window", "absent", "means 4096 tokens; full attention is null")
    fields.must_be("use_sliding_window", False)
    kinds = fields.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise fields.error("layer_types", kinds, "only 'full_attention' layers can be built")


def _qwen3_moe(fields: ConfigFields) -> dict[str, Any]:
    fields.must_be("decoder_sparse_step", 1)
    fields.must_be("mlp_only_layers", [])
    experts = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    num_experts = fields.count(experts, MAX_EXPERTS)
    return _attention_bias(fields) | {
        "has_qk_norm": True,
        "intermediate_size": fields.count("moe_intermediate_size", MAX_WIDTH),
        "num_experts": num_experts,
        "num_experts_per_token": fields.count("num_experts_per_tok", num_experts),
        "has_normalized_routing": fields.flag("norm_topk_prob", False),
    }


def _attention_bias(fields: ConfigFields) -> dict[str, Any]:
    has_bias = fields.flag("attention_bias", False)
    return {"has_qkv_bias": has_bias, "has_attention_out_bias": has_bias}


FAMILIES: dict[str, Callable[[ConfigFields], dict[str, Any]]] = {
    "llama": lambda fields: _attention_bias(fields) | {"has_mlp_bias": fields.flag("mlp_bias", False)},
    "mistral": lambda fields: {},
    "qwen2": lambda fields: {"has_qkv_bias": True},
    "qwen3": lambda fields: (
        _attention_bias(fields) | {"has_qk_norm": True, "head_dim": fields.count("head_dim", MAX_WIDTH, default=128)}
    ),
    "qwen3_moe": _qwen3_moe,
}
