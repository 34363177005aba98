"""How many bytes a kernel or a model call must move, and how many floating-point operations it does.

Every input counts once and every output once, whatever a kernel really reads: so achieved over copied bandwidth is
a share of what is possible, and reads that caches serve make a kernel look better, never worse. Pure numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from faser_backend.core.model import ModelSpec

INT32 = 4


class AttentionShape(NamedTuple):
    """B sequences of `rows` rows each after `context` tokens."""

    num_sequences: int
    context: int
    rows: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_block_size: int = 16


def attention_bytes(shape: AttentionShape, itemsize: int) -> int:
    """Of pruned_chunk_attention: keys and values of the context read; the chunk's read and written to the pool;
    queries read, outputs written; block table, lengths and slots."""
    b, context, rows, heads, kv_heads, head_dim, size = shape
    pool = 2 * b * context * kv_heads * head_dim
    chunk = 2 * 2 * b * rows * kv_heads * head_dim  # read, and written to the pool
    queries = 2 * b * rows * heads * head_dim  # and the outputs
    indices = b * -(-(context + rows) // size) + 2 * b + 1 + b * rows
    return (pool + chunk + queries) * itemsize + indices * INT32


def attention_flops(shape: AttentionShape) -> float:
    """Two products of every row with every key that it sees, a multiplication and an addition each."""
    seen = shape.rows * shape.context + shape.rows * (shape.rows + 1) / 2
    return 4.0 * shape.num_sequences * shape.num_heads * shape.head_dim * seen


def exit_score_bytes(num_rows: int, hidden_size: int, num_candidates: int, itemsize: int) -> int:
    """Of exit_scores: each row, the head's rows of its candidates, the candidates' ids, the scores in float32."""
    return num_rows * (hidden_size * itemsize * (1 + num_candidates) + num_candidates * (8 + 4))


def compaction_bytes(num_kept: int, hidden_size: int, itemsize: int) -> int:
    """Of compact_rows: kept rows read and written, and their indices."""
    return num_kept * (2 * hidden_size * itemsize + 8)


def kv_write_bytes(num_rows: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Of write_kv: keys and values read and written, and the slots."""
    return num_rows * (2 * 2 * num_kv_heads * head_dim * itemsize + INT32)


def layer_weights(spec: ModelSpec) -> int:
    """Numbers in the matrices of one layer."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    return attention + 3 * spec.hidden_size * spec.intermediate_size


def weight_count(spec: ModelSpec) -> int:
    """Numbers that a call with logits reads: all layers and the head, the embedding's few rows left out."""
    return spec.num_layers * layer_weights(spec) + spec.hidden_size * spec.vocab_size


def stored_count(spec: ModelSpec) -> int:
    """Numbers in memory: the embedding too, unless it is the head."""
    embedding = 0 if spec.tie_word_embeddings else spec.hidden_size * spec.vocab_size
    return weight_count(spec) + embedding


def kv_bytes_per_token(spec: ModelSpec, itemsize: int) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize


def call_floor_us(
    spec: ModelSpec,
    num_rows: int,
    num_sequences: int,
    context: int,
    itemsize: int,
    *,
    bytes_per_s: float,
    flops_per_s: float,
) -> float:
    """The least time of a call with logits of every row: its bytes or its arithmetic, whichever takes longer."""
    moved = weight_count(spec) * itemsize + num_sequences * context * kv_bytes_per_token(spec, itemsize)
    products = 2.0 * num_rows * weight_count(spec)
    attention = 4.0 * num_rows * context * spec.num_heads * spec.head_dim * spec.num_layers
    return 1e6 * max(moved / bytes_per_s, (products + attention) / flops_per_s)
