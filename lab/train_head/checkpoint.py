"""A head's initial weights from its target, and its checkpoint in the public format of vLLM, SGLang and
engines/eagle3.py."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from faser_backend.core.model import EAGLE3, ModelSpec
from faser_backend.lab.train_head.head import Head
from faser_backend.lab.train_head.target import NUM_FEATURES, Target, feature_layers, published_layers

SPREAD = 0.02  # deviation of weights not taken from the target


def head_spec(target: ModelSpec, num_kv_heads: int, intermediate_size: int) -> ModelSpec:
    """Returns the head's spec: a Llama of one layer, without biases and experts."""
    return replace(
        target,
        num_layers=1,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        tie_word_embeddings=False,
        family=EAGLE3,
        has_qkv_bias=False,
        has_attention_out_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        num_experts=0,
        num_experts_per_token=0,
        feature_layers=(),
    )


def new_head(target: Target, spec: ModelSpec, token_ids: np.ndarray, seed: int) -> Head:
    """Returns a head that begins as its target's last layer over the highest feature; its logits are the target's rows.

    Parts without a counterpart, and matrices of another shape than the target's, are small random numbers.
    """
    head = Head(spec, NUM_FEATURES, token_ids.size)
    rng = torch.Generator().manual_seed(seed)
    layer, hidden = target.layers[-1], spec.hidden_size
    num_q, num_kv = target.spec.num_heads * spec.head_dim, target.spec.num_kv_heads * spec.head_dim
    q, k, v = layer["qkv"].split([num_q, num_kv, num_kv])
    taken = {
        "midlayer.hidden_norm.weight": layer["input_norm"],
        "midlayer.post_attention_layernorm.weight": layer["mlp_norm"],
        "midlayer.self_attn.o_proj.weight": layer["attention_out"],
        "norm.weight": target.norm,
        "lm_head.weight": target.lm_head[torch.from_numpy(token_ids)],
    } | {f"midlayer.mlp.{name}_proj.weight": layer[name] for name in ("gate", "up", "down") if name in layer}
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, SPREAD, generator=rng)
            if name in taken and taken[name].shape == parameter.shape:
                parameter.copy_(taken[name])
        head.fc.weight[:, -hidden:] = torch.eye(hidden)
        attention = head.midlayer.self_attn
        for projection, matrix in ((attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v)):
            num_heads = projection.weight.shape[0] // spec.head_dim
            of_heads = matrix.unflatten(0, (-1, spec.head_dim))
            if num_heads % of_heads.shape[0] == 0:  # with more heads than the target, each begins as its group's
                repeated = of_heads.repeat_interleave(num_heads // of_heads.shape[0], dim=0)
                projection.weight[:, hidden:] = repeated.flatten(0, 1)
    return head


def save_head(directory: Path, target: ModelSpec, spec: ModelSpec, weights: dict[str, Tensor], ids: Tensor) -> int:
    """Writes config.json and model.safetensors; weights by the published names. Returns the bytes of both.

    ids [num_ids]: the target's ids of the logits. The target's embedding is not stored. d2t holds the target's id minus
    the head's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().to(torch.float16).contiguous() for name, tensor in weights.items()}
    tensors["d2t"] = ids - torch.arange(ids.numel())
    tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    path = directory / "model.safetensors"
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)
    (directory / "config.json").write_text(json.dumps(_config(target, spec, ids.numel()), indent=1) + "\n")
    return path.stat().st_size + (directory / "config.json").stat().st_size


def _config(target: ModelSpec, spec: ModelSpec, num_ids: int) -> dict[str, Any]:
    """Returns the config. It names feature layers only if they are not the published choice, as readers count them
    differently: here, by the layers whose outputs are read."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": num_ids,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float16",
    }
    if spec.rope_scaling is not None:
        names = {"kind": "rope_type", "original_max_context": "original_max_position_embeddings"}
        config["rope_scaling"] = {names.get(name, name): value for name, value in asdict(spec.rope_scaling).items()}
    if published_layers(target) is None:
        outputs = [layer - 1 for layer in feature_layers(target)]
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs}
    return config
