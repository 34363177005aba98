"""GGUF files of small random models, in llama.cpp's format, and the weights that they encode."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from faser_backend.engines.checkpoint import read_json
from faser_backend.engines.safetensors_checkpoint import HuggingFaceCheckpoint

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
NAMES = [  # Hugging Face's pattern -> GGUF's
    (r"model\.embed_tokens\.weight", "token_embd.weight"),
    (r"model\.norm\.weight", "output_norm.weight"),
    (r"lm_head\.weight", "output.weight"),
    (r"model\.layers\.(\d+)\.input_layernorm\.(.+)", r"blk.\1.attn_norm.\2"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.(.+)", r"blk.\1.ffn_norm.\2"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj\.(.+)", r"blk.\1.attn_output.\2"),
    (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(.+)", r"blk.\1.attn_\2.\3"),
    (r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.(.+)", r"blk.\1.attn_\2_norm.\3"),
    (r"model\.layers\.(\d+)\.mlp\.gate\.(.+)", r"blk.\1.ffn_gate_inp.\2"),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(.+)", r"blk.\1.ffn_\2.\3"),
    (r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight", r"blk.\1.ffn_\2_exps.weight"),
]
Edit = Callable[[gguf.GGUFWriter], object]
SCALES: dict[str, dict[int, float]] = {  # by the byte of a block at which each lies
    "Q2_K": {80: 6e-3, 82: 9e-3},  # the second is the subtrahend's
    "Q3_K": {108: 1e-3},
    "Q4_K": {0: 2e-4, 2: 1.5e-3},
    "Q5_K": {0: 2e-4, 2: 3e-3},
    "Q6_K": {208: 4e-5},
    "IQ2_XXS": {0: 1e-3},
    "IQ2_XS": {0: 1e-3},
    "IQ2_S": {0: 1e-3},
    "IQ3_XXS": {0: 5e-4},
    "IQ3_S": {0: 5e-4},
    "IQ4_NL": {0: 1e-3},
    "IQ4_XS": {0: 5e-5},
}


def gguf_name(name: str) -> str:
    """Returns the tensor's name in the file; the experts of a layer share one."""
    for pattern, ours in NAMES:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, ours, name)
    raise AssertionError(name)


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns llama.cpp's row order: row i of a head's second half follows row i of its first."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(rows.shape)


def random_blocks(kind: Type, rows: int, row_size: int, seed: int = 0) -> np.ndarray:
    """Returns blocks [rows, row_bytes] of a type that the package cannot quantise to; their numbers are about 0.05."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows * row_size // block_size, block_bytes), np.uint8)
    for at, scale in SCALES[kind.name].items():
        blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def stored(array: np.ndarray, kind: Type, seed: int) -> np.ndarray:
    """Returns a matrix's rows in a file's type; for a K type, other random numbers."""
    if kind.name in SCALES:
        return random_blocks(kind, array.shape[0], array.shape[1], seed)
    return gguf.quants.quantize(array, kind)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    kind: Type = Type.F32,
    others: Mapping[str, Type] = MappingProxyType({}),
    edit: Edit = lambda writer: None,
    vocabulary: Edit | None = None,
    permutes: bool = True,
) -> PreTrainedModel:
    """Writes the file with matrices in `kind`, sets the model's weights to the file's, and returns the model.

    others: types of single matrices by the file's names. edit: adds metadata and tensors. vocabulary: adds the
    tokenizer; by default one of as many tokens as the model reads. permutes: whether Llama's queries and keys are
    interleaved, as they must be.
    """
    source = path.with_suffix(".hf")
    model.save_pretrained(source)
    checkpoint = HuggingFaceCheckpoint(source, read_json(source / "config.json"))
    config = model.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type])
    add_config(writer, config)
    if vocabulary is None:
        add_vocabulary(writer, ["a", "b", "ab", *(f"token{i}" for i in range(3, config.vocab_size))], merges=["a b"])
    else:
        vocabulary(writer)
    edit(writer)
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    has_pairs = permutes and ARCHITECTURES[config.model_type] == "llama"
    weights: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for seed, name in enumerate(checkpoint.names):
        array, ours = np.array(checkpoint.read(name), np.float32), gguf_name(name)
        own = others.get(ours, kind)
        rows = stored(array, own, seed) if array.ndim == 2 else array
        weights[name] = np.array(gguf.quants.dequantize(rows, own)) if array.ndim == 2 else array
        part = ours.split(".")[2 if ours.startswith("blk.") else 0]
        if has_pairs and part in num_heads:
            rows = interleaved(rows, num_heads[part])
        if part.endswith("_exps"):
            experts.setdefault(ours, {})[int(name.split(".")[5])] = rows
        else:
            writer.add_tensor(ours, np.ascontiguousarray(rows), raw_dtype=own if array.ndim == 2 else None)
    for name, parts in experts.items():
        writer.add_tensor(name, np.stack([parts[i] for i in sorted(parts)]), raw_dtype=kind)
    write(writer)
    return with_weights(model, weights)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_weights(model: PreTrainedModel, weights: dict[str, np.ndarray]) -> PreTrainedModel:
    """Returns the model with these weights, with experts joined as in transformers."""
    state = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in weights.items()}
    for layer in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        if f"{prefix}.gate_up_proj" in model.state_dict():
            experts = range(model.config.num_experts)
            parts = {
                kind: torch.stack([state.pop(f"{prefix}.{e}.{kind}_proj.weight") for e in experts])
                for kind in ("gate", "up", "down")
            }
            state[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
            state[f"{prefix}.down_proj"] = parts["down"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim or config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def add_vocabulary(
    writer: gguf.GGUFWriter,
    tokens: list[str],
    *,
    kind: str = "gpt2",
    pre: str | None = "gpt-2",
    types: list[int] | None = None,
    merges: list[str] | None = None,
    end_id: int = 3,
) -> None:
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [1] * len(tokens))
    if merges is not None:
        writer.add_token_merges(merges)
    writer.add_eos_token_id(end_id)
