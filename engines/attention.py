"""`faser::PrunedChunkAttention`: attention of packed rows over a paged KV pool, as a local function.

One op for every runtime. A runtime with a kernel of its own maps the op to it; the others run the
body below. Contract: rows that were pruned are simply absent, the new keys and values of the rows
that are present are written to the pool first, then each row attends to the tokens of its sequence
up to itself. Inlined, a segment holds ops of the ONNX standard alone; TensorRT-RTX compiles it so,
with its attention layers marked decomposable.
"""

from __future__ import annotations

import onnx

from engines.graph import GraphBuilder
from faser_backend.manifest import ModelSpec

DOMAIN = "faser"
OP_TYPE = "PrunedChunkAttention"
MASKED = -1e30

INPUTS = [
    "q",  # [T, num_heads, 1, head_dim], rotated
    "k",  # [T, Hkv, 1, head_dim], rotated
    "v",  # [T, Hkv, 1, head_dim]
    "k_pool",  # [Hkv, num_blocks, block, head_dim]
    "v_pool",
    "kv_slots",  # [T, Hkv, 1, 3]: head, block and offset of each new key and value
    "block_table",  # [B, MB]
    "pad_idx",  # [B, Q]: row of each padded cell
    "unpad_idx",  # [R]: padded cell of each wanted row
    "mask",  # [B, heads per KV head * Q, MB * block]: 0 where visible, else MASKED
]
OUTPUTS = ["attended", "k_pool_out", "v_pool_out"]  # [R, num_heads * head_dim]; the pools


def attention_mask(graph: GraphBuilder, spec: ModelSpec) -> str:
    """The mask that all layers share: a row sees the columns up to its own position."""
    query_positions = graph.op("Unsqueeze", graph.op("Gather", "positions", "pad_idx"), graph.ints(2))  # [B, Q, 1]
    visible = graph.op("LessOrEqual", "columns", query_positions)  # [B, Q, S]
    mask = graph.op("Where", visible, graph.scalar(0.0), graph.scalar(MASKED))
    num_queries = spec.num_heads // spec.num_kv_heads
    return graph.op("Concat", *[mask] * num_queries, axis=1) if num_queries > 1 else mask


def attention_function(spec: ModelSpec) -> onnx.FunctionProto:
    """The body in standard ops. Query heads of a KV head are stacked as rows of one product."""
    g = GraphBuilder()
    num_kv, num_queries, head_dim = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim
    keys, values = (
        g.op("Reshape", g.op("Gather", pool, "block_table", axis=1), g.ints(0, 0, -1, head_dim))  # [Hkv, B, S, hd]
        for pool in (
            g.op("ScatterND", "k_pool", "kv_slots", "k", out="k_pool_out"),
            g.op("ScatterND", "v_pool", "kv_slots", "v", out="v_pool_out"),
        )
    )
    queries = g.op("Gather", "q", "pad_idx")  # [B, Q, H, 1, hd]
    if num_queries == 1:
        queries = g.op("Transpose", g.op("Reshape", queries, g.ints(0, 0, num_kv, head_dim)), perm=[2, 0, 1, 3])
    else:
        queries = g.op("Reshape", queries, g.ints(0, 0, num_kv, num_queries, head_dim))
        queries = g.op("Reshape", g.op("Transpose", queries, perm=[2, 0, 3, 1, 4]), g.ints(0, 0, -1, head_dim))
    # KV heads as batch and sequences as heads: with a head-major pool nothing larger than q is moved
    mixed = g.op("Attention", queries, keys, values, "mask", scale=head_dim**-0.5)  # [Hkv, B, nQ, hd]
    if num_queries == 1:
        mixed = g.op("Transpose", mixed, perm=[1, 2, 0, 3])
    else:
        mixed = g.op("Reshape", mixed, g.ints(0, 0, num_queries, -1, head_dim))
        mixed = g.op("Transpose", mixed, perm=[1, 3, 0, 2, 4])
    mixed = g.op("Reshape", mixed, g.ints(-1, spec.num_heads * head_dim))  # [B * Q, H * hd]
    g.op("Gather", mixed, "unpad_idx", out="attended")
    return g.function(DOMAIN, OP_TYPE, INPUTS, OUTPUTS)
