"""Attention of packed rows over a paged KV pool, one body per runtime.

Contract of all: rows that were pruned are simply absent, the keys and values of the rows that are
present reach the pool, and each row attends to the tokens of its sequence up to itself. TensorRT-RTX, which
compiles no op of ours, gets standard ops and hands new keys and values out; full TensorRT maps the op
`faser::PrunedChunkAttention` to our plugin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from faser_backend.core.model import ModelSpec
from faser_backend.engines.graph import GraphBuilder
from faser_backend.plugins.tensorrt_contract import ATTENTION_OP, NAMESPACE, VERSION


class AttentionBody(ABC):
    """Attention of every layer of one segment, and the inputs and outputs that it needs."""

    def __init__(self, graph: GraphBuilder, spec: ModelSpec, kv_block_size: int) -> None:
        self.graph = graph
        self.spec = spec
        self.pool_shape: tuple[int | str, ...] = (spec.num_kv_heads, "NB", kv_block_size, spec.head_dim)
        self._declare_inputs()

    @abstractmethod
    def _declare_inputs(self) -> None:
        """Declares what all layers share."""

    @abstractmethod
    def attend(self, layer: int, q: str, k: str, v: str, *, only_logit_rows: bool) -> str:
        """q [T, num_heads, 1, head_dim] and k, v [T, Hkv, 1, head_dim], rotated -> [T, num_heads * head_dim].

        only_logit_rows: the result has the rows of the input `logit_rows` alone, [R, num_heads * head_dim].
        """

    @abstractmethod
    def declare_outputs(self, first_layer: int, last_layer: int) -> None:
        """Declares where the new keys and values of the layers go."""

    def _pools(self, layer: int) -> list[str]:
        return [self.graph.input(f"{name}_pool.{layer}", self.pool_shape, self.graph.dtype) for name in ("k", "v")]


class GatheredAttention(AttentionBody):
    """For TensorRT-RTX: the pool's blocks and this call's keys side by side, masked; standard ops alone."""

    def _declare_inputs(self) -> None:
        g = self.graph
        g.input("pad_idx", ("B", "Q"))
        g.input("unpad_idx", ("T",))
        g.input("block_table", ("B", "MB"))
        g.input("columns", ("S",))
        g.input("context_lens", ("B",))
        self._mask = self._make_mask()

    def _make_mask(self) -> str:
        """[B, 1, Q, S + Q], true where visible: the context, then this call's rows up to the query's.

        A new key's position follows from its column in [B, Q], not from the row that it holds: padding columns
        repeat a row, and lie behind every query that counts.
        """
        g = self.graph
        query_positions = g.op("Unsqueeze", g.op("Gather", "positions", "pad_idx"), g.ints(2))  # [B, Q, 1]
        context_lens = g.op("Unsqueeze", "context_lens", g.ints(1))  # [B, 1]
        in_context = g.op("Unsqueeze", g.op("Less", "columns", context_lens), g.ints(1))  # [B, 1, S]
        in_context = g.op("Expand", in_context, g.op("Shape", query_positions))  # [B, Q, S]
        max_rows = g.op("Squeeze", g.op("Shape", "pad_idx", start=1, end=2), g.ints(0))
        new_columns = g.op("Range", g.integer(0), max_rows, g.integer(1))  # [Q]
        key_positions = g.op("Unsqueeze", g.op("Add", context_lens, new_columns), g.ints(1))  # [B, 1, Q]
        is_past = g.op("LessOrEqual", key_positions, query_positions)  # [B, Q, Q]
        return g.op("Unsqueeze", g.op("Concat", in_context, is_past, axis=2), g.ints(1))

    def attend(self, layer: int, q: str, k: str, v: str, *, only_logit_rows: bool) -> str:
        g, spec = self.graph, self.spec
        queries = self._padded(g.op("Reshape", q, g.ints(0, spec.num_heads, spec.head_dim)))
        keys, values = (
            self._visible(new, pool, out=f"{name}_new.{layer}")
            for name, new, pool in zip(("k", "v"), (k, v), self._pools(layer), strict=True)
        )
        mixed = g.op("Attention", queries, keys, values, self._mask, scale=spec.head_dim**-0.5)  # [B, H, Q, hd]
        mixed = g.op("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = g.op("Reshape", mixed, g.ints(-1, spec.num_heads * spec.head_dim))  # [B * Q, H * hd]
        cells = g.op("Gather", "unpad_idx", "logit_rows") if only_logit_rows else "unpad_idx"
        return g.op("Gather", mixed, cells)

    def _visible(self, new: str, pool: str, out: str) -> str:
        """Keys or values that queries can see, [B, Hkv, S + Q, head_dim]; the new ones are `out` too."""
        g, spec = self.graph, self.spec
        new = g.op("Reshape", new, g.ints(0, spec.num_kv_heads, spec.head_dim), out=out)  # [T, Hkv, hd]
        old = g.op("Gather", pool, "block_table", axis=1)  # [Hkv, B, MB, block, hd]
        old = g.op("Reshape", old, g.ints(0, 0, -1, spec.head_dim))
        return g.op("Concat", g.op("Transpose", old, perm=[1, 0, 2, 3]), self._padded(new), axis=2)

    def _padded(self, x: str) -> str:
        """[T, heads, head_dim] -> [B, heads, Q, head_dim]"""
        return self.graph.op("Transpose", self.graph.op("Gather", x, "pad_idx"), perm=[0, 2, 1, 3])

    def declare_outputs(self, first_layer: int, last_layer: int) -> None:
        g, spec = self.graph, self.spec
        for layer in range(first_layer, last_layer):
            for name in ("k", "v"):
                g.output(f"{name}_new.{layer}", ("T", spec.num_kv_heads, spec.head_dim), g.dtype)


class PluginAttention(AttentionBody):
    """For full TensorRT: the op without a body, its inputs in the order of our kernel's launcher."""

    def _declare_inputs(self) -> None:
        g = self.graph
        g.input("slot_mapping", ("T",), "int32")
        g.input("cu_rows", ("B + 1",), "int32")
        g.input("context_lens", ("B",), "int32")
        g.input("block_table", ("B", "MB"), "int32")

    def attend(self, layer: int, q: str, k: str, v: str, *, only_logit_rows: bool) -> str:
        g, spec = self.graph, self.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        packed = [
            g.op("Reshape", x, g.ints(0, num_heads, spec.head_dim))  # [T, heads, hd]
            for x, num_heads in zip((q, k, v), heads, strict=True)
        ]
        inputs = [*packed, *self._pools(layer), "block_table", "cu_rows", "context_lens", "slot_mapping"]
        outs = [f"attended.{layer}", f"k_pool_out.{layer}", f"v_pool_out.{layer}"]
        plugin = {"plugin_namespace": NAMESPACE, "plugin_version": VERSION}
        mixed = g.ops(ATTENTION_OP, *inputs, outs=outs, domain=NAMESPACE, **plugin)[0]  # [T, H, hd]
        mixed = g.op("Reshape", mixed, g.ints(0, spec.num_heads * spec.head_dim))
        return g.op("Gather", mixed, "logit_rows") if only_logit_rows else mixed

    def declare_outputs(self, first_layer: int, last_layer: int) -> None:
        for layer in range(first_layer, last_layer):
            for name in ("k", "v"):
                self.graph.output(f"{name}_pool_out.{layer}", self.pool_shape, self.graph.dtype)


BODIES: dict[str, type[AttentionBody]] = {
    "tensorrt_rtx": GatheredAttention,
    "tensorrt": PluginAttention,
}
