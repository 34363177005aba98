"""The decoder, once: layers [first, last) of a model as an ONNX graph over packed rows.

Rows (T) are tokens of any sequences, packed; only attention knows sequences. The last layer of the
last segment computes attention output and MLP for the logit rows alone, so prefill, which wants no
logits, pays there for keys and values only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from engines.attention import DOMAIN, OP_TYPE, attention_function, attention_mask
from engines.families import LayerWeights, ModelWeights
from engines.graph import GraphBuilder, WeightStore
from faser_backend.manifest import ModelSpec, TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGraph:
    """A segment that can be written to disk: its model and the tensors of its border."""

    model: onnx.ModelProto
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def build_segment(
    spec: ModelSpec,
    weights: ModelWeights,
    store: WeightStore,
    first_layer: int,
    last_layer: int,
    *,
    kv_block_size: int,
    has_exit_scores: bool = False,
) -> SegmentGraph:
    """Layers [first_layer, last_layer); embedding and head come with the first and the last layer.

    Exit scores are the final-norm hidden state times the head's rows of each row's candidates.
    """
    return _SegmentBuilder(spec, weights, store, kv_block_size).build(first_layer, last_layer, has_exit_scores)


class _SegmentBuilder:
    def __init__(self, spec: ModelSpec, weights: ModelWeights, store: WeightStore, kv_block_size: int) -> None:
        self.spec = spec
        self.weights = weights
        self.block_size = kv_block_size
        self.graph = GraphBuilder(store)
        self.graph.functions.append(attention_function(spec))

    def build(self, first: int, last: int, has_exit_scores: bool) -> SegmentGraph:
        g, spec = self.graph, self.spec
        is_first, is_last = first == 0, last == spec.num_layers
        hidden = self._embedded() if is_first else g.input("hidden", ("T", spec.hidden_size), "float32")
        self._shared_inputs(is_last)
        for layer in range(first, last):
            out = "hidden_out" if layer == last - 1 and not is_last else None
            hidden = self._layer(layer, hidden, only_logit_rows=layer == spec.num_layers - 1, out=out)
        if is_last:
            g.op("Gemm", self._norm(hidden, "norm", self.weights.final_norm), self._head(), transB=1, out="logits")
            g.output("logits", ("R", spec.vocab_size))
        else:
            g.output("hidden_out", ("T", spec.hidden_size))
            if has_exit_scores:
                self._exit_scores("hidden_out")
        for layer in range(first, last):
            for name in ("k", "v"):
                g.output(f"{name}_pool_out.{layer}", self._pool_shape)
        model = g.model(f"layers_{first}_{last}")
        return SegmentGraph(model, tuple(g.inputs), tuple(g.outputs))

    def _embedded(self) -> str:
        token_ids = self.graph.input("token_ids", ("T",))
        return self.graph.op("Gather", self.graph.weight("embedding", self.weights.embedding), token_ids)

    def _shared_inputs(self, is_last: bool) -> None:
        g = self.graph
        g.input("positions", ("T",))
        g.input("pad_idx", ("B", "Q"))
        g.input("unpad_idx", ("T",))
        g.input("block_table", ("B", "MB"))
        g.input("columns", ("S",))
        g.input("kv_slots", ("T", self.spec.num_kv_heads, 1, 3))
        self.mask = attention_mask(g, self.spec)
        self.rope_positions = g.op("Unsqueeze", "positions", g.ints(1))  # [T, 1]
        cos, sin = rotary_tables(self.spec)
        self.cos, self.sin = g.weight("rope_cos", cos), g.weight("rope_sin", sin)
        if is_last:
            g.input("logit_rows", ("R",))
            self.logit_cells = g.op("Gather", "unpad_idx", "logit_rows")

    def _layer(self, layer: int, hidden: str, *, only_logit_rows: bool, out: str | None) -> str:
        g, w = self.graph, self.weights.layers[layer]
        prefix = f"layers.{layer}"
        normed = self._norm(hidden, f"{prefix}.input_norm", w.input_norm)
        attended = self._attention(layer, normed, w, "unpad_idx" if not only_logit_rows else self.logit_cells)
        if only_logit_rows:
            hidden = g.op("Gather", hidden, "logit_rows")
        hidden = g.op("Add", hidden, g.op("MatMul", attended, g.weight(f"{prefix}.attention_out", w.attention_out)))
        normed = self._norm(hidden, f"{prefix}.mlp_norm", w.mlp_norm)
        gate = g.op("MatMul", normed, g.weight(f"{prefix}.gate", w.gate))
        up = g.op("MatMul", normed, g.weight(f"{prefix}.up", w.up))
        gated = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        return g.op("Add", hidden, g.op("MatMul", gated, g.weight(f"{prefix}.down", w.down)), out=out)

    def _attention(self, layer: int, normed: str, w: LayerWeights, unpad_idx: str) -> str:
        g, spec = self.graph, self.spec
        num_heads, num_kv = spec.num_heads, spec.num_kv_heads
        qkv = g.op("MatMul", normed, g.weight(f"layers.{layer}.qkv", w.qkv))
        qkv = g.op("Reshape", qkv, g.ints(0, num_heads + 2 * num_kv, 1, spec.head_dim))
        q, k, v = g.ops("Split", qkv, g.ints(num_heads, num_kv, num_kv), outs=3, axis=1)
        q, k = (g.op("RotaryEmbedding", x, self.cos, self.sin, self.rope_positions) for x in (q, k))
        pools = [g.input(f"{name}_pool.{layer}", self._pool_shape, "float32") for name in ("k", "v")]
        inputs = [q, k, v, *pools, "kv_slots", "block_table", "pad_idx", unpad_idx, self.mask]
        outs = [f"attended.{layer}", f"k_pool_out.{layer}", f"v_pool_out.{layer}"]
        return g.ops(OP_TYPE, *inputs, outs=outs, domain=DOMAIN)[0]

    def _norm(self, x: str, name: str, weight: np.ndarray) -> str:
        g = self.graph
        return g.op("RMSNormalization", x, g.weight(name, weight), axis=-1, epsilon=self.spec.rms_eps)

    def _head(self) -> str:
        tied = self.weights.lm_head is self.weights.embedding
        return self.graph.weight("embedding" if tied else "lm_head", self.weights.lm_head)

    def _exit_scores(self, hidden: str) -> None:
        g = self.graph
        g.input("exit_candidates", ("T", "K"))
        normed = self._norm(hidden, "norm", self.weights.final_norm)
        rows = g.op("Gather", self._head(), "exit_candidates")  # [T, K, hidden_size]
        scores = g.op("MatMul", rows, g.op("Unsqueeze", normed, g.ints(2)))  # [T, K, 1]
        g.op("Squeeze", scores, g.ints(2), out="exit_scores")
        g.output("exit_scores", ("T", "K"))

    @property
    def _pool_shape(self) -> tuple[int | str, ...]:
        return (self.spec.num_kv_heads, "NB", self.block_size, self.spec.head_dim)


def rotary_tables(spec: ModelSpec) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [max_context, head_dim / 2] of position * theta^(-2i / head_dim), from float64."""
    half = spec.head_dim // 2
    angles = np.arange(spec.max_context)[:, None] * spec.rope_theta ** (-np.arange(half) / half)[None]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
