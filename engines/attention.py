"""Attention of packed rows over a paged KV pool as ONNX nodes, one class per TensorRT runtime.

In both, pruned rows are absent, the keys and values of present rows reach the pool, and each row attends to the tokens
of its sequence up to itself. TensorRT-RTX cannot compile custom ops: its graph uses standard ops and outputs new keys
and values. Full TensorRT maps the ops `faser::AttendSplits` and `faser::CombineSplits` to the project's plugins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict

from faser_backend.core.model import ModelSpec
from faser_backend.engines.graph import GraphBuilder
from faser_backend.plugins.tensorrt_contract import (
    ATTEND_OP,
    ATTEND_OUTPUTS,
    ATTENTION_INPUTS,
    COMBINE_INPUTS,
    COMBINE_OP,
    NAMESPACE,
    VERSION,
    Geometry,
)


class AttentionBody(ABC):
    """The attention of all layers of one segment, with its inputs and outputs."""

    def __init__(self, graph: GraphBuilder, spec: ModelSpec, kv_block_size: int, geometry: Geometry | None) -> None:
        """geometry: of the plugins, if the runtime has them."""
        self.graph = graph
        self.spec = spec
        self.geometry = geometry
        self.pool_shape: tuple[int | str, ...] = (spec.num_kv_heads, "NB", kv_block_size, spec.head_dim)
        self._declare_inputs()

    @abstractmethod
    def _declare_inputs(self) -> None:
        """Declares the inputs that all layers share."""

    @abstractmethod
    def attend(self, layer: int, q: str, k: str, v: str, *, only_logit_rows: bool) -> str:
        """Adds a layer: rotated q [T, num_heads, 1, head_dim], k, v [T, Hkv, 1, head_dim] -> [T, num_heads * head_dim].

        only_logit_rows: the result has only the rows of the input `logit_rows`, [R, num_heads * head_dim].
        """

    @abstractmethod
    def declare_outputs(self, first_layer: int, last_layer: int) -> None:
        """Declares the outputs for the layers' new keys and values."""

    def _pools(self, layer: int) -> list[str]:
        return [self.graph.input(f"{name}_pool.{layer}", self.pool_shape, self.graph.dtype) for name in ("k", "v")]


class GatheredAttention(AttentionBody):
    """Attention for TensorRT-RTX: masked, over the pool's blocks joined with this call's keys, in standard ops."""

    def _declare_inputs(self) -> None:
        g = self.graph
        g.input("pad_idx", ("B", "Q"))
        g.input("unpad_idx", ("T",))
        g.input("block_table", ("B", "MB"))
        g.input("columns", ("S",))
        g.input("context_lens", ("B",))
        self._mask = self._make_mask()

    def _make_mask(self) -> str:
        """Returns the mask [B, 1, Q, S + Q]: true for the context, and for this call's rows up to the query's.

        A new key's position follows from its column in [B, Q], not from the row that it holds. Padding columns
        repeat a row, and lie behind all valid queries.
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
        indices = g.op("Gather", "unpad_idx", "logit_rows") if only_logit_rows else "unpad_idx"
        return g.op("Gather", mixed, indices)

    def _visible(self, new: str, pool: str, out: str) -> str:
        """Returns old and new keys or values, [B, Hkv, S + Q, head_dim]; the new ones are also the output `out`."""
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
    """Attention for full TensorRT: two plugins, because TensorRT launches one kernel per plugin."""

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
        outs = [f"{name}.{layer}" for name in ATTEND_OUTPUTS]
        assert self.geometry is not None, "a plugin needs its attributes"
        plugin = {**asdict(self.geometry), "plugin_namespace": NAMESPACE, "plugin_version": VERSION}
        g.ops(ATTEND_OP, *inputs, outs=outs, domain=NAMESPACE, **plugin)
        values = dict(zip((*ATTENTION_INPUTS, *ATTEND_OUTPUTS), (*inputs, *outs), strict=True))
        mixed = g.op(COMBINE_OP, *(values[name] for name in COMBINE_INPUTS), domain=NAMESPACE, **plugin)  # [T, H, hd]
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
