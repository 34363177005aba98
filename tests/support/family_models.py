"""Small random checkpoints of every model family and variant, and the same as TensorRT-LLM would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.tiny_models import DEFAULTS, write_tokenizer

CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama_attention_bias": ("llama", {"attention_bias": True}),
    "llama_all_biases_tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_tied_bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_moe_plain_shares": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False, "num_experts_per_tok": 3}),
}


def random_model(variant: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Weights large enough that every bias and norm shows in the logits, small enough to stay in float32's reach."""
    family, own = VARIANTS[variant]
    torch.manual_seed(seed)
    config = CONFIGS[family](**{**DEFAULTS, **own, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.25)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return model


def write_model(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    """A Hugging Face checkpoint with a tokenizer of as many tokens as the model reads."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, **options)
    write_tokenizer(directory, model.config.vocab_size)
    return directory
