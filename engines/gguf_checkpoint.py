"""A GGUF file as a checkpoint: config and tensors by Hugging Face's names, rows in Hugging Face's order.

A key of the architecture that is not known is refused by its name, as a factor that is ignored would make another
model. Factors of rotary frequencies lie in a tensor, and are told apart by what Llama 3.1 and later have.

Queries and keys of architecture `llama` are stored with the two halves of each head interleaved, experts of a layer
as one tensor. The tokenizer is written out as tokenizer.json into a folder that lives as long as the checkpoint.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from faser_backend.core.model import MAX_CONTEXT, MAX_EXPERTS, MAX_HEADS, MAX_WIDTH, RopeScaling
from faser_backend.engines.checkpoint_base import Checkpoint, CheckpointError, ConfigFields
from faser_backend.engines.gguf_file import GGUFFile
from faser_backend.engines.gguf_tokenizer import read_gguf_vocabulary, write_tokenizer_files

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",  # the router
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}

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


class _Source(NamedTuple):
    """One tensor of Hugging Face's: all of a tensor of the file, or one expert of it."""

    tensor: str
    expert: int | None = None
    num_heads: int = 0  # whose halves are interleaved; 0: rows are in order


class GGUFCheckpoint(Checkpoint):
    """Quantised tensors count as F16 and are read as float32."""

    def __init__(self, path: Path) -> None:
        self.origin = path
        self._file = GGUFFile(path)
        self.fields = read_config(self._file)  # first: an architecture that is unknown is told before its tokenizer
        vocabulary = read_gguf_vocabulary(path, self._file.metadata)
        config = self.fields.values
        config["eos_token_id"] = list(vocabulary.end_ids)
        self._sources: dict[str, _Source] = {}
        for tensor in self._file.tensors:
            for name, source in self._from(tensor):
                self._sources[name] = source
        self.directory = Path(tempfile.mkdtemp(prefix="faser-gguf."))
        weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        write_tokenizer_files(vocabulary, config.get("max_position_embeddings"), self.directory)

    @property
    def names(self) -> Collection[str]:
        return self._sources.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        shape = self._file.tensors[source.tensor].shape
        return shape if source.expert is None else shape[1:]

    def dtype(self, name: str) -> str:
        return self._file.dtype(self._sources[name].tensor)

    def read(self, name: str) -> np.ndarray:
        return self._file.numbers(self._sources[name].tensor, self.read_stored(name))

    def stored_type(self, name: str) -> str:
        return self._file.tensors[self._sources[name].tensor].type_name

    def read_stored(self, name: str) -> np.ndarray:
        source = self._sources[name]
        rows = self._file.rows(source.tensor, source.expert)
        if source.num_heads:
            rows = _in_halves(rows, source.num_heads)
        return rows

    def _from(self, tensor: str) -> Iterator[tuple[str, _Source]]:
        """Hugging Face's tensors that a tensor of the file is or holds."""
        match = LAYER.fullmatch(tensor)
        if tensor in OUTSIDE:
            yield OUTSIDE[tensor], _Source(tensor)
        elif match and match[2] in LAYER_NAMES:
            num_heads = self._num_heads(match[2], tensor)
            yield f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}", _Source(tensor, num_heads=num_heads)
        elif match and match[2] in EXPERTS and match[3] == "weight":
            shape = self._file.tensors[tensor].shape
            if len(shape) != 3 or shape[0] > MAX_EXPERTS:
                wanted = f"must be [experts, out, in] of at most {MAX_EXPERTS} experts"
                raise CheckpointError(f"{self.origin}: shape of {tensor} = {list(shape)}: {wanted}")
            for expert in range(shape[0]):
                name = f"model.layers.{match[1]}.mlp.experts.{expert}.{EXPERTS[match[2]]}.weight"
                yield name, _Source(tensor, expert)
        elif tensor != ROPE_FACTORS:
            raise CheckpointError(f"{self.origin}: tensor {tensor!r} belongs to no part of a model that is known")

    def _num_heads(self, kind: str, tensor: str) -> int:
        """Heads of a tensor whose rows are interleaved, 0 for others."""
        if self.fields.values["model_type"] != "llama" or kind not in HEADS:
            return 0
        default = self.fields.count("num_attention_heads", MAX_HEADS)
        num_heads = self.fields.count(HEADS[kind], MAX_HEADS, default)
        num_rows = self._file.tensors[tensor].shape[0]
        if num_rows % (2 * num_heads):
            raise CheckpointError(
                f"{self.origin}: rows of {tensor} = {num_rows}: must be whole pairs of rows of {num_heads} heads"
            )
        return num_heads


def _in_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [num_heads * (half * 2), ...] whose halves are interleaved -> [num_heads * (2 * half), ...]."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


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
