"""Writes a transformers model as a TensorRT-LLM unified checkpoint, sharded over ranks as its converters do."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import pad
from transformers import PreTrainedModel

from tests.support.tiny_models import write_tokenizer

Tensors = dict[str, torch.Tensor]


def write_trtllm(
    model: PreTrainedModel,
    directory: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    embedding_axis: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes the checkpoint. embedding_axis: None for a copy on every rank, otherwise the sharded axis."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(model, tp, pp, embedding_axis)))
    for stage in range(pp):
        for rank in range(tp):
            tensors = _rank_tensors(model, stage=stage, rank=rank, tp=tp, pp=pp, embedding_axis=embedding_axis)
            tensors = {name: tensor.to(dtype).contiguous().clone() for name, tensor in tensors.items()}
            save_file(tensors, directory / f"rank{stage * tp + rank}.safetensors")
    write_tokenizer(directory, model.config.vocab_size)
    return directory


def _config(model: PreTrainedModel, tp: int, pp: int, embedding_axis: int | None) -> dict[str, Any]:
    ours: Any = model.config
    rope = dict(ours.rope_parameters)
    theta = rope.pop("rope_theta")
    is_llama, has_experts = ours.model_type in ("llama", "mistral"), ours.model_type == "qwen3_moe"
    experts = getattr(ours, "num_experts", 0) if has_experts else 0
    return {
        "architecture": ours.architectures[0] if ours.architectures else type(model).__name__,
        "dtype": "float32",
        "logits_dtype": "float32",
        "vocab_size": ours.vocab_size,
        "max_position_embeddings": ours.max_position_embeddings,
        "hidden_size": ours.hidden_size,
        "num_hidden_layers": ours.num_hidden_layers,
        "num_attention_heads": ours.num_attention_heads,
        "num_key_value_heads": ours.num_key_value_heads,
        "head_size": getattr(ours, "head_dim", None) or ours.hidden_size // ours.num_attention_heads,
        "intermediate_size": ours.intermediate_size,
        "moe_intermediate_size": getattr(ours, "moe_intermediate_size", 0),
        "hidden_act": "swiglu" if has_experts else "silu",
        "norm_epsilon": ours.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": theta,
        "rotary_scaling": None if rope["rope_type"] == "default" else rope,
        "attn_bias": getattr(ours, "attention_bias", not is_llama),
        "mlp_bias": getattr(ours, "mlp_bias", False),
        "use_parallel_embedding": embedding_axis is not None,
        "embedding_sharding_dim": embedding_axis or 0,
        "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp, "cp_size": 1, "moe_tp_size": tp},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128},
        "moe": {
            "num_experts": experts,
            "top_k": getattr(ours, "num_experts_per_tok", 0) if experts else 0,
            "normalization_mode": int(getattr(ours, "norm_topk_prob", False)),
        },
    }


def _rank_tensors(
    model: PreTrainedModel, *, stage: int, rank: int, tp: int, pp: int, embedding_axis: int | None
) -> Tensors:
    state: Tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    layers = torch.arange(model.config.num_hidden_layers).tensor_split(pp)[stage].tolist()
    tensors: Tensors = {}
    for local, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        shared = _attention(model, own, rank, tp) | (_experts if "mlp.gate.weight" in own else _mlp)(own, rank, tp)
        tensors |= {f"transformer.layers.{local}.{name}": tensor for name, tensor in shared.items()}
    embedding, vocab_size = state["model.embed_tokens.weight"], model.config.vocab_size
    padding = (0, 0, 0, -vocab_size % tp)
    if stage == 0:
        sliced = embedding if embedding_axis is None else pad(embedding, padding).chunk(tp, embedding_axis)[rank]
        tensors["transformer.vocab_embedding.weight"] = sliced[:vocab_size] if embedding_axis == 1 else sliced
    if stage == pp - 1:
        tensors["transformer.ln_f.weight"] = state["model.norm.weight"]
        tensors["lm_head.weight"] = pad(state["lm_head.weight"], padding).chunk(tp)[rank]
    return tensors


def _attention(model: PreTrainedModel, own: Tensors, rank: int, tp: int) -> Tensors:
    ours: Any = model.config
    num_kv = ours.num_key_value_heads
    head_dim = own["self_attn.k_proj.weight"].shape[0] // num_kv
    tensors = {
        "input_layernorm.weight": own["input_layernorm.weight"],
        "post_layernorm.weight": own["post_attention_layernorm.weight"],
        "attention.dense.weight": own["self_attn.o_proj.weight"].chunk(tp, 1)[rank],
    }
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            q, k, v = (own[f"self_attn.{name}_proj.{kind}"] for name in ("q", "k", "v"))
            if num_kv < tp:  # every rank holds a head: heads are repeated side by side
                heads = [x.unflatten(0, (num_kv, head_dim)) for x in (k, v)]
                k, v = (x.repeat_interleave(tp // num_kv, 0).flatten(0, 1) for x in heads)
            tensors[f"attention.qkv.{kind}"] = torch.cat([x.chunk(tp)[rank] for x in (q, k, v)])
    copied = {"o_proj.bias": "dense.bias", "q_norm.weight": "q_layernorm.weight", "k_norm.weight": "k_layernorm.weight"}
    for name, theirs in copied.items():
        if f"self_attn.{name}" in own:
            tensors[f"attention.{theirs}"] = own[f"self_attn.{name}"]
    return tensors


def _mlp(own: Tensors, rank: int, tp: int) -> Tensors:
    tensors = {"mlp.proj.weight": own["mlp.down_proj.weight"].chunk(tp, 1)[rank]}
    for kind in ("weight", "bias"):
        for ours, theirs in (("gate_proj", "fc"), ("up_proj", "gate")):
            if f"mlp.{ours}.{kind}" in own:
                tensors[f"mlp.{theirs}.{kind}"] = own[f"mlp.{ours}.{kind}"].chunk(tp)[rank]
    if "mlp.down_proj.bias" in own:
        tensors["mlp.proj.bias"] = own["mlp.down_proj.bias"]
    return tensors


def _experts(own: Tensors, rank: int, tp: int) -> Tensors:
    """Reorders experts: transformers holds (gate, up) of all experts as one tensor, TensorRT-LLM (up, gate)."""
    gate, up = own["mlp.experts.gate_up_proj"].chunk(2, 1)  # [E, inner, hidden]
    return {
        "mlp.router.weight": own["mlp.gate.weight"],
        "mlp.fc.weight": torch.cat([up.chunk(tp, 1)[rank], gate.chunk(tp, 1)[rank]], 1),
        "mlp.proj.weight": own["mlp.experts.down_proj"].chunk(tp, 2)[rank],
    }
