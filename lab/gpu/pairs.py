"""Synthetic pairs: the shapes of real models, weights drawn on the device. They say nothing; their speed is real.

Sizes are those of the models' config.json files. Weights are scaled by fan-in, and what writes to the residual
stream also by depth, so that hidden states stay near 1 and nothing overflows in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engines.torch_build import segment_tensors
from faser_backend.core.model import ModelSpec, rotary_tables
from faser_backend.device.cuda.pool import DTYPES
from faser_backend.device.cuda.torch_weights import LayerTensors, ModelTensors
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import FileSpec, ModelEngine, SegmentSpec
from lab.gpu.byte_model import stored_count

MAX_CONTEXT = 1024  # of a request; bounds the KV pools


@dataclass(frozen=True, slots=True)
class PairShape:
    """exit_layer: of the target, after which verifications may prune; 0 = none."""

    name: str
    target: ModelSpec
    draft: ModelSpec
    exit_layer: int
    max_num_seqs: int


def _qwen3(num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int, *, tied: bool) -> ModelSpec:
    return ModelSpec(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate_size,
        vocab_size=151_936,
        max_context=MAX_CONTEXT,
        rope_theta=1e6,
        rms_eps=1e-6,
        tie_word_embeddings=tied,
        family="qwen3",
        has_qk_norm=True,
    )


def _tiny(num_layers: int, hidden_size: int) -> ModelSpec:
    return ModelSpec(
        num_layers, hidden_size, 4, 2, 16, 2 * hidden_size, 101, 192, 1e4, 1e-6, tie_word_embeddings=False,
        has_qk_norm=True,
    )  # fmt: skip


_QWEN3_0_6B = _qwen3(28, 1024, 16, 3072, tied=True)
_QWEN3_8B = _qwen3(36, 4096, 32, 12288, tied=False)
_QWEN3_32B = _qwen3(64, 5120, 64, 25600, tied=False)
# An exit at a fifth of the depth, as in the public study of a 36-layer model that finds layer 7 to break even.
PAIRS = {
    pair.name: pair
    for pair in (
        PairShape("qwen3-8b/0.6b", _QWEN3_8B, _QWEN3_0_6B, 7, 64),
        PairShape("qwen3-32b/0.6b", _QWEN3_32B, _QWEN3_0_6B, 13, 24),
        PairShape("tiny", _tiny(3, 64), _tiny(1, 32), 1, 4),
    )
}


def model_pair(shape: PairShape, dtype: str) -> ModelPair:
    """Both models as a manifest would describe them; their weight files do not exist."""
    cuts = (shape.exit_layer, shape.target.num_layers) if shape.exit_layer else (shape.target.num_layers,)
    return ModelPair(
        _model_engine("target", shape.target, cuts, dtype),
        _model_engine("draft", shape.draft, (shape.draft.num_layers,), dtype),
    )


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    return stored_count(spec) * DTYPES[dtype].itemsize


def _model_engine(name: str, spec: ModelSpec, cuts: tuple[int, ...], dtype: str) -> ModelEngine:
    file = FileSpec(f"{name}.synthetic", "", weight_bytes(spec, dtype))
    tensor_dtype = str(DTYPES[dtype]).removeprefix("torch.")
    segments = tuple(
        SegmentSpec(file, first, last, *segment_tensors(spec, first, last, tensor_dtype))
        for first, last in zip((0, *cuts[:-1]), cuts, strict=True)
    )
    return ModelEngine(spec, file, segments)


def random_tensors(spec: ModelSpec, dtype: str, device: torch.device, seed: int) -> ModelTensors:
    """A model's weights, drawn in place: no more memory is taken than they need."""
    generator = torch.Generator(device).manual_seed(seed)
    depth_scale = (2.0 * spec.num_layers) ** -0.5

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.empty(rows, columns, dtype=DTYPES[dtype], device=device)
        return values.normal_(0.0, scale * columns**-0.5, generator=generator)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.float32, device=device)

    hidden, wide, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    layers = tuple(
        LayerTensors(
            input_norm=ones(hidden),
            qkv=matrix(heads + 2 * kv, hidden),
            attention_out=matrix(hidden, heads, depth_scale),
            mlp_norm=ones(hidden),
            gate_up=matrix(2 * wide, hidden),
            down=matrix(hidden, wide, depth_scale),
            q_norm=ones(spec.head_dim) if spec.has_qk_norm else None,
            k_norm=ones(spec.head_dim) if spec.has_qk_norm else None,
        )
        for _ in range(spec.num_layers)
    )
    embedding = matrix(spec.vocab_size, hidden, hidden**0.5)
    head = embedding if spec.tie_word_embeddings else matrix(spec.vocab_size, hidden)
    cos, sin = (torch.from_numpy(table).to(device) for table in rotary_tables(spec))
    return ModelTensors(embedding, layers, ones(hidden), head, cos, sin)
