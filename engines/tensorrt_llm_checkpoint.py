"""Reads TensorRT-LLM's unified checkpoints, one safetensors file per rank, as one model.

Stages hold consecutive layers, numbered from zero in each stage; the ranks of a stage hold slices of its tensors. The
vocabulary may be padded to a multiple of the ranks. If there are fewer KV heads than ranks, each is held more than
once. Config and tensors get Hugging Face's names. Features without a counterpart there (scaled embeddings, quantised
weights, context parallelism) are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from faser_backend.engines.checkpoint import CONFIG_FILE, Checkpoint, CheckpointError, ConfigFields
from faser_backend.engines.safetensors_checkpoint import SafetensorsFile

LAYER = re.compile(r"transformer\.layers\.(\d+)\.(.+)")
OUTSIDE = {"transformer.ln_f.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}
EMBEDDING = "transformer.vocab_embedding.weight"
LAYER_NAMES: dict[str, tuple[str, int | None]] = {  # -> name, axis along which it is sliced, or None
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "post_layernorm.weight": ("post_attention_layernorm.weight", None),
    "attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "attention.dense.weight": ("self_attn.o_proj.weight", 1),
    "attention.dense.bias": ("self_attn.o_proj.bias", None),
    "mlp.fc.weight": ("mlp.gate_proj.weight", 0),  # the activation is applied to fc
    "mlp.fc.bias": ("mlp.gate_proj.bias", 0),
    "mlp.gate.weight": ("mlp.up_proj.weight", 0),
    "mlp.gate.bias": ("mlp.up_proj.bias", 0),
    "mlp.proj.weight": ("mlp.down_proj.weight", 1),
    "mlp.proj.bias": ("mlp.down_proj.bias", None),
    "mlp.router.weight": ("mlp.gate.weight", None),
}
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
Part = tuple[int | slice, ...]


class _Merged(NamedTuple):
    """A tensor: the same part of the same tensor in some files, joined along an axis."""

    files: tuple[SafetensorsFile, ...]
    name: str
    axis: int = 0
    part: Part = ()
    vocab_size: int | None = None  # further rows are padding

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what `read` returns. Only padding that makes the ranks' slices equal is cut."""
        shapes = [np.broadcast_to(np.int8(0), file.shape(self.name))[self.part].shape for file in self.files]
        rows, *rest = shapes[0]
        if self.axis == 0:
            rows *= len(self.files)
        elif rest:
            rest[self.axis - 1] *= len(self.files)
        if self.vocab_size is not None and 0 < rows - self.vocab_size < len(self.files):
            rows = self.vocab_size
        return (rows, *rest)

    def read(self) -> np.ndarray:
        parts = [file.read(self.name, self.part) for file in self.files]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.axis)
        return array[: self.shape[0]]


class TensorRTLLMCheckpoint(Checkpoint):
    """A directory in TensorRT-LLM's layout. `fields` are those of the translated config."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.origin = self.directory = directory
        fields = ConfigFields(config, directory / CONFIG_FILE)
        self._num_heads = fields.count("num_attention_heads", 1 << 20)
        self._num_kv_heads = fields.count("num_key_value_heads", 1 << 20, default=self._num_heads)
        self._ranks = read_ranks(fields, self._num_heads, self._num_kv_heads)
        hidden_size = fields.count("hidden_size", 1 << 20)
        self._head_dim = fields.count("head_size", 1 << 20, default=max(hidden_size // self._num_heads, 1))
        self._vocab_size = fields.count("vocab_size", 1 << 22)
        self._merged: dict[str, _Merged] = {}
        first_layer = 0
        for stage in range(self._ranks.num_stages):
            first_layer += self._add_stage(stage, first_layer)
        self.fields = ConfigFields(translated(fields, has_head="lm_head.weight" in self._merged), fields.where)

    @property
    def names(self) -> Collection[str]:
        return self._merged.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._merged[name].shape

    def dtype(self, name: str) -> str:
        """Returns the dtype. Raises CheckpointError if it differs between ranks."""
        merged = self._merged[name]
        dtypes = {file.path.name: file.dtype(merged.name) for file in merged.files}
        if len(set(dtypes.values())) > 1:
            raise CheckpointError(f"{self.directory}: {merged.name} has dtypes {dtypes}: ranks must agree")
        return next(iter(dtypes.values()))

    def read(self, name: str) -> np.ndarray:
        return self._merged[name].read()

    def _add_stage(self, stage: int, first_layer: int) -> int:
        """Adds the tensors of a pipeline stage, and returns its number of layers."""
        ranks = range(stage * self._ranks.num_slices, (stage + 1) * self._ranks.num_slices)
        files = tuple(SafetensorsFile(self.directory / f"rank{rank}.safetensors") for rank in ranks)
        for file in files[1:]:
            for name in sorted(set(files[0].names) ^ set(file.names)):
                lacking = file if name in files[0].names else files[0]
                raise CheckpointError(f"{lacking.path}: tensor {name} is missing, but another rank has a slice of it")
            for name in file.names:
                shapes = [list(one.shape(name)) for one in (file, files[0])]
                if shapes[0] != shapes[1]:
                    raise CheckpointError(f"{file.path}: {name} has shape {shapes[0]}, in another rank {shapes[1]}")
        num_layers = 0
        for name in files[0].names:
            if not files[0].shape(name):
                raise CheckpointError(f"{files[0].path}: {name} has shape []: must be a vector or more")
            for ours, merged in self._from(name, files, first_layer):
                if ours in self._merged:
                    raise CheckpointError(f"{files[0].path}: {name}: an earlier stage also holds this tensor")
                self._merged[ours] = merged
            if match := LAYER.fullmatch(name):
                num_layers = max(num_layers, int(match[1]) + 1)
        return num_layers

    def _from(self, name: str, files: tuple[SafetensorsFile, ...], first_layer: int) -> Iterator[tuple[str, _Merged]]:
        """Yields Hugging Face's tensors that are made from a tensor of the ranks."""
        match = LAYER.fullmatch(name)
        prefix, suffix = (f"model.layers.{first_layer + int(match[1])}.", match[2]) if match else ("", "")
        if name == EMBEDDING:
            axis = self._ranks.embedding_axis
            merged = _Merged(files if axis is not None else files[:1], name, axis or 0, vocab_size=self._vocab_size)
            yield "model.embed_tokens.weight", merged
        elif name in OUTSIDE:
            is_head = name == "lm_head.weight"
            vocab_size = self._vocab_size if is_head else None
            yield OUTSIDE[name], _Merged(files if is_head else files[:1], name, vocab_size=vocab_size)
        elif suffix in ("attention.qkv.weight", "attention.qkv.bias"):
            yield from self._projections(prefix, suffix.rpartition(".")[2], name, files)
        elif suffix in ("mlp.fc.weight", "mlp.proj.weight") and len(files[0].shape(name)) == 3:
            yield from _experts(prefix, suffix, name, files)
        elif suffix in LAYER_NAMES:
            ours, axis = LAYER_NAMES[suffix]
            yield prefix + ours, _Merged(files if axis is not None else files[:1], name, axis or 0)
        else:
            raise CheckpointError(f"{files[0].path}: tensor {name} belongs to no part of a supported model")

    def _projections(
        self, prefix: str, kind: str, name: str, files: tuple[SafetensorsFile, ...]
    ) -> Iterator[tuple[str, _Merged]]:
        """Separates queries, keys and values, which follow each other in each rank's rows."""
        num_copies = max(len(files) // self._num_kv_heads, 1)  # ranks that hold the same KV head
        num_q = self._num_heads // len(files) * self._head_dim
        num_kv = max(self._num_kv_heads // len(files), 1) * self._head_dim
        rows = {"q": slice(0, num_q), "k": slice(num_q, num_q + num_kv), "v": slice(num_q + num_kv, None)}
        for projection, part in rows.items():
            holders = files if projection == "q" else files[::num_copies]
            yield f"{prefix}self_attn.{projection}_proj.{kind}", _Merged(holders, name, part=(part,))


def _experts(prefix: str, suffix: str, name: str, files: tuple[SafetensorsFile, ...]) -> Iterator[tuple[str, _Merged]]:
    """Separates experts: fc stacks (up, gate), [E, 2 * inner, hidden]; proj stacks down, [E, hidden, inner]."""
    num_experts, num_rows, _ = files[0].shape(name)
    for expert in range(num_experts):
        module = f"{prefix}mlp.experts.{expert}"
        if suffix == "mlp.proj.weight":
            yield f"{module}.down_proj.weight", _Merged(files, name, axis=1, part=(expert,))
        else:
            half = num_rows // 2
            yield f"{module}.up_proj.weight", _Merged(files, name, part=(expert, slice(0, half)))
            yield f"{module}.gate_proj.weight", _Merged(files, name, part=(expert, slice(half, None)))


class Ranks(NamedTuple):
    """The ranks of a checkpoint: stage s, slice t is in rank{s * num_slices + t}.safetensors."""

    num_stages: int  # pipeline parallel
    num_slices: int  # tensor parallel
    embedding_axis: int | None  # along which the embedding is sliced; None: every rank has all of it


def read_ranks(fields: ConfigFields, num_heads: int, num_kv_heads: int) -> Ranks:
    """Reads the mapping. Raises CheckpointError for ways of sharding that cannot be merged."""
    mapping = fields.section("mapping")
    mapping.must_be("cp_size", 1)
    mapping.must_be("moe_ep_size", 1, -1)
    num_slices, num_stages = (mapping.count(name, MAX_RANKS, default=1) for name in ("tp_size", "pp_size"))
    world_size = mapping.count("world_size", MAX_RANKS, default=num_slices * num_stages)
    if world_size != num_slices * num_stages:
        raise fields.error("mapping.world_size", world_size, f"must be tp_size * pp_size = {num_slices * num_stages}")
    if num_heads % num_slices or (num_kv_heads % num_slices and num_slices % num_kv_heads):
        raise fields.error(
            "mapping.tp_size", num_slices, f"cannot divide {num_heads} attention and {num_kv_heads} KV heads"
        )
    if not fields.flag("use_parallel_embedding", False):
        return Ranks(num_stages, num_slices, None)
    fields.must_be("embedding_sharding_dim", 0, 1)
    return Ranks(num_stages, num_slices, fields.values.get("embedding_sharding_dim") or 0)


def translated(fields: ConfigFields, *, has_head: bool) -> dict[str, Any]:
    """Returns the config in Hugging Face's names. has_head: the checkpoint has a head besides the embedding."""
    _refuse_variants(fields)
    architecture = fields.values["architecture"]
    config = {ours: fields.values[name] for name, ours in NAMES.items() if name in fields.values}
    if architecture == "Qwen3MoeForCausalLM":
        moe = fields.section("moe")
        config |= {
            "num_experts": moe.values.get("num_experts"),
            "num_experts_per_tok": moe.values.get("top_k"),
            "norm_topk_prob": moe.count("normalization_mode", 1, 1, least=0) == 1,  # 0: shares do not sum to 1
        }
    return config | {
        "model_type": ARCHITECTURES[architecture],
        "hidden_act": "silu",
        "sliding_window": None,
        "tie_word_embeddings": not has_head,
    }


def _refuse_variants(fields: ConfigFields) -> None:
    fields.choice("architecture", ARCHITECTURES)
    quantization = fields.section("quantization")
    for name in ("quant_algo", "kv_cache_quant_algo"):
        algorithm = quantization.values.get(name)
        if algorithm is not None:
            raise fields.error(f"quantization.{name}", algorithm, "quantised weights are not supported")
    fields.must_be("position_embedding_type", "rope_gpt_neox")
    fields.must_be("hidden_act", "silu", "swiglu")
    fields.must_be("rotary_pct", 1, 1.0)
    fields.must_be("use_logn_attn", False)
    fields.must_be("residual_mlp", False)
    for name in MULTIPLIERS:
        fields.must_be(name, 1, 1.0)
    default = fields.values["hidden_size"] // fields.values["num_attention_heads"]
    fields.must_be("rotary_embedding_dim", fields.values.get("head_size") or default)
