"""config.json of a TensorRT-LLM checkpoint in Hugging Face's words, and how its ranks share the model.

What has no counterpart there (scaled embeddings, quantised weights, context parallelism) is refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engines.config_fields import ConfigFields

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
NAMES = {  # TensorRT-LLM's: Hugging Face's
    "head_size": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rotary_scaling": "rope_scaling",
    "attn_bias": "attention_bias",
} | {
    name: name
    for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "intermediate_size", "max_position_embeddings", "mlp_bias", "moe_intermediate_size", "eos_token_id",
    )
}  # fmt: skip
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "output_multiplier_scale")
MAX_RANKS = 1024


class Ranks(NamedTuple):
    """Stage s, slice t of the checkpoint lies in rank{s * num_slices + t}.safetensors."""

    num_stages: int  # pipeline parallel
    num_slices: int  # tensor parallel
    embedding_axis: int | None  # along which the embedding is sliced; None: every rank holds all of it


def read_ranks(fields: ConfigFields) -> Ranks:
    """Raises CheckpointError for ways of sharing a model that cannot be merged."""
    mapping = fields.section("mapping") or ConfigFields({}, fields.where)
    mapping.must_be("cp_size", 1)
    mapping.must_be("moe_ep_size", 1, -1)
    num_slices, num_stages = (mapping.count(name, MAX_RANKS, default=1) for name in ("tp_size", "pp_size"))
    world_size = mapping.count("world_size", MAX_RANKS, default=num_slices * num_stages)
    if world_size != num_slices * num_stages:
        raise fields.error("mapping.world_size", world_size, f"must be tp_size * pp_size = {num_slices * num_stages}")
    num_heads = fields.count("num_attention_heads", 1 << 20)
    num_kv_heads = fields.count("num_key_value_heads", 1 << 20, default=num_heads)
    if num_heads % num_slices or (num_kv_heads % num_slices and num_slices % num_kv_heads):
        raise fields.error(
            "mapping.tp_size", num_slices, f"cannot share {num_heads} attention and {num_kv_heads} KV heads"
        )
    if not fields.flag("use_parallel_embedding", False):
        return Ranks(num_stages, num_slices, None)
    fields.must_be("embedding_sharding_dim", 0, 1)
    return Ranks(num_stages, num_slices, fields.values.get("embedding_sharding_dim") or 0)


def translated(fields: ConfigFields, *, has_head: bool) -> dict[str, Any]:
    """The config in Hugging Face's words. has_head: the checkpoint holds a head that is not the embedding."""
    _refuse_variants(fields)
    architecture = fields.values["architecture"]
    config = {ours: fields.values[name] for name, ours in NAMES.items() if name in fields.values}
    if architecture == "Qwen3MoeForCausalLM":
        config |= _experts(fields)
    return config | {
        "model_type": ARCHITECTURES[architecture],
        "hidden_act": "silu",
        "tie_word_embeddings": not has_head,
    }


def _refuse_variants(fields: ConfigFields) -> None:
    architecture = fields.values["architecture"]
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise fields.error("architecture", architecture, f"must be one of {', '.join(ARCHITECTURES)}")
    quantization = fields.section("quantization") or ConfigFields({}, fields.where)
    for name in ("quant_algo", "kv_cache_quant_algo"):
        algorithm = quantization.values.get(name)
        if algorithm is not None:
            raise fields.error(f"quantization.{name}", algorithm, "quantised weights cannot be built from")
    fields.must_be("position_embedding_type", "rope_gpt_neox")
    fields.must_be("hidden_act", "silu", "swiglu")
    fields.must_be("rotary_pct", 1, 1.0)
    fields.must_be("use_logn_attn", False)
    fields.must_be("residual_mlp", False)
    for name in MULTIPLIERS:
        fields.must_be(name, 1, 1.0)
    if fields.values.get("head_size") is not None:
        fields.must_be("rotary_embedding_dim", fields.values["head_size"])


def _experts(fields: ConfigFields) -> dict[str, Any]:
    moe = fields.section("moe") or ConfigFields({}, fields.where)
    moe.must_be("normalization_mode", 0, 1)  # weights as the softmax gives them, or divided by their sum
    return {
        "num_experts": moe.values.get("num_experts"),
        "num_experts_per_tok": moe.values.get("top_k"),
        "norm_topk_prob": moe.values.get("normalization_mode") == 1,
    }
