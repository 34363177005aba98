"""Shapes of published models and GPUs, and the bytes and FLOPs of a model call.

Every input and every output counts once, however often a kernel reads it, so achieved bandwidth over copy bandwidth is
a share of what is possible. Figures come from data sheets and the models' config.json files. Assumptions about their
use are in simulation/costs.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from faser_backend.core.model import ModelSpec

INT32 = 4


@dataclass(frozen=True, slots=True)
class Machine:
    """num_gpus equal GPUs, tensor-parallel. Peaks are per GPU."""

    name: str
    num_gpus: int
    flops_per_s: float  # dense bf16
    bytes_per_s: float  # memory bandwidth
    memory_bytes: float
    num_sms: int
    link_bytes_per_s: float  # NVLink, one direction


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft. exit_layers: layers of the target after which a verification may prune. max_num_seqs: for
    a real GPU."""

    name: str
    target: ModelSpec
    draft: ModelSpec
    exit_layers: tuple[int, ...]
    max_num_seqs: int = 64


def _spec(
    layers: int, hidden: int, heads: int, inner: int, vocab: int, *, tied: bool, head_dim: int = 128
) -> ModelSpec:
    return ModelSpec(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        intermediate_size=inner,
        vocab_size=vocab,
        max_context=1024,  # bounds the KV pools on a real GPU
        rope_theta=1e6,
        rms_eps=1e-6,
        tie_word_embeddings=tied,
    )


def _qwen3(layers: int, hidden: int, heads: int, inner: int, *, tied: bool = False) -> ModelSpec:
    return replace(_spec(layers, hidden, heads, inner, 151_936, tied=tied), family="qwen3", has_qk_norm=True)


def _tiny(layers: int, hidden: int) -> ModelSpec:
    return ModelSpec(layers, hidden, 4, 2, 16, 2 * hidden, 101, 192, 1e4, 1e-6, False, has_qk_norm=True)


# NVIDIA's data sheets: H100 SXM5 (in the 96 GB variant that the paper used) and H200 SXM.
_H100 = (989e12, 3.35e12, 96e9, 132, 450e9)
_H200 = (989e12, 4.8e12, 141e9, 132, 450e9)
MACHINES = {
    name: Machine(name, count, *figures)
    for name, count, figures in (("h100", 1, _H100), ("h100x2", 2, _H100), ("h200", 1, _H200), ("h200x2", 2, _H200))
}
_SMALL = _qwen3(28, 1024, 16, 3072, tied=True)
# An exit at a fifth of the depth: in a public study of a 36-layer model, layer 7 breaks even.
PAIRS = {
    pair.name: pair
    for pair in (
        Pair("qwen3-32b/0.6b", _qwen3(64, 5120, 64, 25600), _SMALL, (13,), 24),
        Pair("qwen3-8b/0.6b", _qwen3(36, 4096, 32, 12288), _SMALL, (7,)),
        Pair(
            "llama3.3-70b/3.2-1b",
            _spec(80, 8192, 64, 28672, 128_256, tied=False),
            _spec(16, 2048, 32, 8192, 128_256, tied=True, head_dim=64),
            (16,),
        ),
    )
}
TINY_PAIR = Pair("tiny", _tiny(3, 64), _tiny(1, 32), (1,), 4)  # tests the code; its figures mean nothing


def layer_weights(spec: ModelSpec) -> int:
    """Returns the number of weights in the matrices of one layer."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    return attention + 3 * spec.hidden_size * spec.intermediate_size


def head_weights(spec: ModelSpec) -> int:
    return spec.hidden_size * spec.vocab_size


def weight_count(spec: ModelSpec) -> int:
    """Returns the number of weights that a call with logits reads: all layers and the head."""
    return spec.num_layers * layer_weights(spec) + head_weights(spec)


def stored_count(spec: ModelSpec) -> int:
    """Returns the number of weights in memory: with the embedding, unless it is also the head."""
    return weight_count(spec) + (0 if spec.tie_word_embeddings else head_weights(spec))


def kv_bytes_per_token(spec: ModelSpec, itemsize: int = 2) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize


def row_flops(spec: ModelSpec) -> float:
    """Returns the operations of one row with logits: a multiplication and an addition per weight."""
    return 2.0 * weight_count(spec)


class AttentionShape(NamedTuple):
    """A call with B sequences of `rows` rows each, after `context` tokens."""

    num_sequences: int
    context: int
    rows: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_block_size: int = 16


def attention_bytes(shape: AttentionShape, itemsize: int) -> int:
    """Returns the bytes that pruned_chunk_attention moves: reads of the context's keys and values; the chunk's own,
    read and written to the pool; queries, outputs, block table, lengths and slot mapping."""
    b, context, rows, heads, kv_heads, head_dim, size = shape
    pool = 2 * b * context * kv_heads * head_dim
    chunk = 2 * 2 * b * rows * kv_heads * head_dim  # read, and written to the pool
    queries = 2 * b * rows * heads * head_dim  # and the outputs
    indices = b * -(-(context + rows) // size) + 2 * b + 1 + b * rows
    return (pool + chunk + queries) * itemsize + indices * INT32
