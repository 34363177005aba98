"""A trained head as a checkpoint in the public layout, which vLLM, SGLang and engines/eagle3.py read."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from faser_backend.core.model import ModelSpec
from lab.train_head.begin import is_published

FORMAT = torch.float16


def head_config(spec: ModelSpec, target: ModelSpec, layers: tuple[int, ...], num_ids: int) -> dict[str, Any]:
    """layers: of the target, whose inputs the head reads. A config names them only where they are not the published
    choice, as readers disagree on what they count there: here, layers whose outputs are read."""
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
        scaling = asdict(spec.rope_scaling)
        names = {"kind": "rope_type", "original_max_context": "original_max_position_embeddings"}
        config["rope_scaling"] = {names.get(name, name): value for name, value in scaling.items()}
    if not is_published(layers, target):
        outputs = [layer - 1 for layer in layers]
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs}
    return config


def save_head(directory: Path, config: dict[str, Any], weights: dict[str, Tensor], token_ids: np.ndarray) -> int:
    """Writes config.json and model.safetensors; weights by the published names. Returns the bytes of both.

    The embedding is not among them: it is the target's. d2t holds the target's id minus the head's own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().to(FORMAT).contiguous() for name, tensor in weights.items()}
    ids = torch.from_numpy(token_ids)
    tensors["d2t"] = ids - torch.arange(ids.numel())
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    path = directory / "model.safetensors"
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return path.stat().st_size + (directory / "config.json").stat().st_size
