"""A draft's initial weights from its target, and its checkpoint in the public formats of engines/eagle3.py and
engines/dflash.py."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from faser_backend.core.model import DFLASH, EAGLE3, ModelSpec
from faser_backend.lab.train_head.block import Block
from faser_backend.lab.train_head.head import Head
from faser_backend.lab.train_head.target import NUM_FEATURES, Target, feature_layers, published_layers

SPREAD = 0.02  # deviation of weights not taken from the target
PLAIN = {
    "tie_word_embeddings": False,
    "has_qkv_bias": False,
    "has_attention_out_bias": False,
    "has_mlp_bias": False,
    "num_experts": 0,
    "num_experts_per_token": 0,
    "feature_layers": (),
}


def head_spec(target: ModelSpec, num_kv_heads: int, intermediate_size: int) -> ModelSpec:
    """Returns the head's spec: a Llama of one layer, without biases and experts."""
    shape = {"num_layers": 1, "num_kv_heads": num_kv_heads, "intermediate_size": intermediate_size}
    return replace(target, family=EAGLE3, has_qk_norm=False, **shape, **PLAIN)


def block_spec(target: ModelSpec, shape: dict[str, int]) -> ModelSpec:
    """Returns a block drafter's spec: a Qwen3 without biases and experts."""
    return replace(target, family=DFLASH, has_qk_norm=True, **shape, **PLAIN)


def new_head(target: Target, spec: ModelSpec, token_ids: np.ndarray, seed: int) -> Head:
    """Returns a head that begins as its target's last layer over the highest feature; its logits are the target's rows.

    Parts without a counterpart, and matrices of another shape than the target's, are small random numbers.
    """
    head, hidden = Head(spec, NUM_FEATURES, token_ids.size), spec.hidden_size
    layer = _layer(target, -1, spec)
    taken = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    taken |= {
        "midlayer.hidden_norm.weight": layer["input_layernorm.weight"],
        "norm.weight": target.norm,
        "lm_head.weight": target.lm_head[torch.from_numpy(token_ids)],
    }
    del taken["midlayer.input_layernorm.weight"]  # of embeddings
    _begin(head, taken, seed)
    with torch.no_grad():
        for name, parameter in head.midlayer.self_attn.named_parameters():
            if (matrix := layer[f"self_attn.{name}"]).shape == parameter[:, hidden:].shape:
                parameter[:, hidden:] = matrix
    return head


def new_block(target: Target, spec: ModelSpec, seed: int) -> Block:
    """Returns a block drafter that begins as its target's last layers over the highest feature, as `new_head` does.

    A target without norms of queries and keys gives them the size that they have behind its own norm.
    """
    block = Block(spec, NUM_FEATURES)
    taken = {"norm.weight": target.norm, "hidden_norm.weight": target.layers[-1]["input_norm"]}
    for index in range(spec.num_layers):
        layer = _layer(target, index - spec.num_layers, spec)
        for name in ("q", "k"):
            usual = (layer[f"self_attn.{name}_proj.weight"].float() * layer["input_layernorm.weight"]).square().sum(1)
            layer.setdefault(f"self_attn.{name}_norm.weight", usual.mean().sqrt().expand(spec.head_dim))
        taken |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
    _begin(block, taken, seed)
    return block


def _layer(target: Target, index: int, spec: ModelSpec) -> dict[str, Tensor]:
    """Returns a layer of the target by published names; with more heads than the target, each is its group's."""
    layer, own = target.layers[index], target.spec
    heads = [own.num_heads, own.num_kv_heads, own.num_kv_heads]
    found = {f"mlp.{name}_proj.weight": layer[name] for name in ("gate", "up", "down") if name in layer}
    found |= {f"self_attn.{name}.weight": layer[name] for name in ("q_norm", "k_norm") if name in layer}
    parts = layer["qkv"].split([num_heads * own.head_dim for num_heads in heads])
    for name, part, num_heads in zip("qkv", parts, heads, strict=True):
        num_copies = max(1, (spec.num_heads if name == "q" else spec.num_kv_heads) // num_heads)
        copied = part.unflatten(0, (-1, own.head_dim)).repeat_interleave(num_copies, dim=0)
        found[f"self_attn.{name}_proj.weight"] = copied.flatten(0, 1)
    return found | {
        "self_attn.o_proj.weight": layer["attention_out"],
        "input_layernorm.weight": layer["input_norm"],
        "post_attention_layernorm.weight": layer["mlp_norm"],
    }


@torch.no_grad()
def _begin(network: Block | Head, taken: dict[str, Tensor], seed: int) -> None:
    """Sets all weights: those of another shape than the target's to small random numbers."""
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, SPREAD, generator=rng)
        if name in taken and taken[name].shape == parameter.shape:
            parameter.copy_(taken[name])
    hidden = network.fc.weight.shape[0]
    network.fc.weight[:, -hidden:] = torch.eye(hidden)


def save_head(directory: Path, target: ModelSpec, spec: ModelSpec, weights: dict[str, Tensor], ids: Tensor) -> int:
    """Writes config.json and model.safetensors; weights by the published names. Returns the bytes of both.

    ids [num_ids]: the target's ids of the logits. The target's embedding is not stored. d2t holds the target's id minus
    the head's.
    """
    maps = {
        "d2t": ids - torch.arange(ids.numel()),
        "t2d": torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill(0, ids, True),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": ids.numel(),
        "tie_word_embeddings": False,
    }
    # Feature layers are named only if they are not the published choice, as readers count them differently.
    if published_layers(target) is None:
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": _outputs(target)}
    return _save(directory, spec, weights, config, maps)


def save_block(directory: Path, target: ModelSpec, spec: ModelSpec, weights: dict[str, Tensor]) -> int:
    """Writes a block drafter, as `save_head` does. The target's embedding and output head are not stored."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "num_target_layers": target.num_layers,
        "layer_types": ["full_attention"] * spec.num_layers,
        "dflash_config": {"mask_token_id": spec.mask_id, "target_layer_ids": _outputs(target)},
        "tie_word_embeddings": target.tie_word_embeddings,
    }
    return _save(directory, spec, weights, config, {})


def _outputs(target: ModelSpec) -> list[int]:
    """Returns the feature layers as configs count them: by the layers whose outputs are read."""
    return [layer - 1 for layer in feature_layers(target)]


def _save(
    directory: Path, spec: ModelSpec, weights: dict[str, Tensor], config: dict[str, Any], maps: dict[str, Tensor]
) -> int:
    """Writes both files, the weights in fp16. config: the fields of this kind."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().to(torch.float16).contiguous() for name, tensor in weights.items()}
    path = directory / "model.safetensors"
    partial = path.with_suffix(".partial")
    save_file(tensors | maps, partial)
    partial.replace(path)
    config |= {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float16",
    }
    if spec.rope_scaling is not None:
        names = {"kind": "rope_type", "original_max_context": "original_max_position_embeddings"}
        config["rope_scaling"] = {names.get(name, name): value for name, value in asdict(spec.rope_scaling).items()}
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return path.stat().st_size + (directory / "config.json").stat().st_size
