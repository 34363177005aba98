"""The metadata of a GGUF file as config.json in Hugging Face's words.

A key of the architecture that is not known is refused by its name, as a factor that is ignored would make another
model. Factors of rotary frequencies lie in a tensor, and are told apart by what Llama 3.1 and later have.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engines.config_fields import ConfigFields
from engines.families import MAX_CONTEXT, MAX_HEADS, MAX_WIDTH
from engines.gguf_file import GGUFFile
from faser_backend.core.model import RopeScaling

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
NAMES = {  # Hugging Face's: after the architecture's name and a dot
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
FIXED: dict[str, tuple[Any, ...]] = {  # what only one variant of can be built
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "leading_dense_block_count": (0,),
    "use_parallel_residual": (False,),
}
READ_APART = {
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_CONTEXT = 8192  # that every model with such factors was pretrained on
LLAMA3_TURNS = (1.0, 4.0)  # low_freq_factor, high_freq_factor


def read_config(file: GGUFFile) -> ConfigFields:
    """The config, whose errors name the file's own keys.

    Raises CheckpointError for what has no counterpart there.
    """
    found = ConfigFields(file.metadata, file.path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise found.error("general.architecture", architecture, f"must be one of {', '.join(ARCHITECTURES)}")
    found.must_be("split.count", 0, 1)
    _check_keys(found, architecture)
    keys = {name: f"{architecture}.{key}" for name, key in NAMES.items()}
    config = {name: file.metadata[key] for name, key in keys.items() if key in file.metadata}
    config |= {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": file.metadata.get(f"{architecture}.vocab_size", _num_embeddings(file)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    if architecture == "qwen3moe":
        config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
        config["norm_topk_prob"] = True
    else:
        found.must_be(keys["num_experts"], 0)
    config["rope_scaling"] = _rope_scaling(file, found, architecture)
    rope_names = {"rope_type": "rope.scaling.type", "factor": "rope.scaling.factor", "vocab_size": "vocab_size"}
    keys |= {name: f"{architecture}.{key}" for name, key in rope_names.items()}
    return ConfigFields(config, file.path, keys)


def _check_keys(found: ConfigFields, architecture: str) -> None:
    """Refuses keys that are not known, and variants that cannot be built."""
    known = {*NAMES.values(), *FIXED, *READ_APART}
    for key, value in found.values.items():
        if key.startswith(f"{architecture}.") and key.removeprefix(f"{architecture}.") not in known:
            raise found.error(repr(key)[1:-1], value, "what this means for the model is not known")
    for key, values in FIXED.items():
        found.must_be(f"{architecture}.{key}", *values)
    head_dim = _head_dim(found, architecture)
    for key in ("attention.value_length", "rope.dimension_count"):
        found.must_be(f"{architecture}.{key}", head_dim)


def _head_dim(found: ConfigFields, architecture: str) -> int:
    hidden_size = found.count(f"{architecture}.embedding_length", MAX_WIDTH)
    num_heads = found.count(f"{architecture}.attention.head_count", MAX_HEADS)
    return found.count(f"{architecture}.attention.key_length", MAX_WIDTH, default=max(hidden_size // num_heads, 1))


def _num_embeddings(file: GGUFFile) -> int | None:
    """Rows of the embedding, where there is one."""
    embedding = file.tensors.get("token_embd.weight")
    return None if embedding is None else embedding.shape[0]


def _rope_scaling(file: GGUFFile, found: ConfigFields, architecture: str) -> dict[str, Any] | None:
    """As config.json has it; None where frequencies are as they are."""
    prefix = f"{architecture}.rope.scaling"
    kind = file.metadata.get(f"{prefix}.type", "none")
    if ROPE_FACTORS not in file.tensors:
        return None if kind == "none" else {"rope_type": kind, "factor": file.metadata.get(f"{prefix}.factor")}
    if kind != "none":
        raise found.error(f"{prefix}.type", kind, f"must be 'none', as there is a tensor {ROPE_FACTORS} too")
    rows = file.rows(ROPE_FACTORS)
    factors = file.numbers(ROPE_FACTORS, rows).astype(np.float64)
    half = _head_dim(found, architecture) // 2
    if factors.shape != (half,) or factors.min() <= 0:
        raise found.error(ROPE_FACTORS, factors.tolist(), f"must be {half} numbers above 0")
    if (factors == 1.0).all():
        return None
    theta = found.number(f"{architecture}.rope.freq_base", 1.0, 1e12, 10000.0)
    context = found.count(f"{prefix}.original_context_length", MAX_CONTEXT, default=LLAMA3_CONTEXT)
    scaling = RopeScaling("llama3", float(factors.max()), *LLAMA3_TURNS, context)
    frequencies = theta ** (-np.arange(half) / half)
    wanted = frequencies / scaling.scaled(frequencies)
    if not np.allclose(factors, wanted, rtol=1e-4):
        index = int(np.abs(factors / wanted - 1).argmax())
        reason = f"must be {wanted[index]:g}, as Llama 3.1 scales positions; no other factors can be built"
        raise found.error(f"{ROPE_FACTORS}[{index}]", float(factors[index]), reason)
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": context,
    }
