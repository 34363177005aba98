"""What each model family calls its dimensions and tensors. One adapter per family; Llama today.

An adapter turns config.json into a `ModelSpec` and names the tensors of a layer; everything after
that is the same decoder for every family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.checkpoint import Checkpoint, CheckpointError
from faser_backend.manifest import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of one layer, ready to multiply rows from the right: [in, out]."""

    input_norm: np.ndarray  # [hidden_size]
    qkv: np.ndarray  # [hidden_size, (num_heads + 2 * num_kv_heads) * head_dim]
    attention_out: np.ndarray  # [num_heads * head_dim, hidden_size]
    mlp_norm: np.ndarray  # [hidden_size]
    gate: np.ndarray  # [hidden_size, intermediate_size]
    up: np.ndarray  # [hidden_size, intermediate_size]
    down: np.ndarray  # [intermediate_size, hidden_size]


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """A decoder's weights. `lm_head` is `embedding` itself where they are tied."""

    embedding: np.ndarray  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: np.ndarray  # [hidden_size]
    lm_head: np.ndarray  # [vocab_size, hidden_size]


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Dimensions of a checkpoint. Raises CheckpointError for a model that cannot be built."""
    family = checkpoint.config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{checkpoint.directory}: model_type = {family!r}: must be one of {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[family](checkpoint)


def read_weights(checkpoint: Checkpoint, spec: ModelSpec) -> ModelWeights:
    """All weights, float32, with the matrices that share an input joined side by side."""
    embedding = checkpoint.read("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    lm_head = embedding
    if not spec.tie_word_embeddings:
        lm_head = checkpoint.read("lm_head.weight", (spec.vocab_size, spec.hidden_size))
    layers = tuple(_read_layer(checkpoint, spec, layer) for layer in range(spec.num_layers))
    return ModelWeights(embedding, layers, checkpoint.read("model.norm.weight", (spec.hidden_size,)), lm_head)


def _read_layer(checkpoint: Checkpoint, spec: ModelSpec, layer: int) -> LayerWeights:
    hidden = spec.hidden_size

    def norm(name: str) -> np.ndarray:
        return checkpoint.read(f"model.layers.{layer}.{name}.weight", (hidden,))

    def matrices(*sizes: tuple[str, int, int]) -> np.ndarray:
        parts = [checkpoint.read(f"model.layers.{layer}.{name}.weight", (out, into)).T for name, into, out in sizes]
        return np.ascontiguousarray(np.concatenate(parts, axis=1))

    num_q, num_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return LayerWeights(
        input_norm=norm("input_layernorm"),
        qkv=matrices(
            ("self_attn.q_proj", hidden, num_q),
            ("self_attn.k_proj", hidden, num_kv),
            ("self_attn.v_proj", hidden, num_kv),
        ),
        attention_out=matrices(("self_attn.o_proj", num_q, hidden)),
        mlp_norm=norm("post_attention_layernorm"),
        gate=matrices(("mlp.gate_proj", hidden, spec.intermediate_size)),
        up=matrices(("mlp.up_proj", hidden, spec.intermediate_size)),
        down=matrices(("mlp.down_proj", spec.intermediate_size, hidden)),
    )


def _llama_spec(checkpoint: Checkpoint) -> ModelSpec:
    config = checkpoint.config
    where = checkpoint.directory / "config.json"
    for field, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(field, wanted) != wanted:
            raise CheckpointError(f"{where}: {field} = {config[field]!r}: only {wanted!r} can be built")
    num_heads = _count(config, "num_attention_heads", where)
    num_kv_heads = _count(config, "num_key_value_heads", where, default=num_heads)
    hidden_size = _count(config, "hidden_size", where)
    head_dim = _count(config, "head_dim", where, default=hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{where}: num_key_value_heads = {num_kv_heads}: must divide num_attention_heads = {num_heads}"
        )
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim = {head_dim}: must be even")
    tied = config.get("tie_word_embeddings", False)
    return ModelSpec(
        num_layers=_count(config, "num_hidden_layers", where),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_count(config, "intermediate_size", where),
        vocab_size=_count(config, "vocab_size", where),
        max_context=_count(config, "max_position_embeddings", where),
        rope_theta=_rope_theta(config, where),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(tied),
        family="llama",
    )


def _rope_theta(config: dict[str, Any], where: object) -> float:
    """Newer configs keep rotary settings in `rope_parameters`, older ones in `rope_theta` + `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"{where}: rope_type = {kind!r}: only 'default' can be built")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def _count(config: dict[str, Any], field: str, where: object, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{where}: {field} = {value!r}: must be a whole number of at least 1")
    return value


FAMILIES: dict[str, Callable[[Checkpoint], ModelSpec]] = {"llama": _llama_spec}
