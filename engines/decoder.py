"""The decoder, once: layers [first, last) of a model as an ONNX graph over packed rows.

Rows (T) are tokens of any sequences, packed; only attention knows sequences. The last layer of the
last segment computes attention output and MLP for the logit rows alone, so prefill, which wants no
logits, pays there for keys and values only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx

from engines.attention import BODIES, AttentionBody
from engines.families import LayerWeights, ModelWeights
from engines.graph import FLOAT_TYPES, GraphBuilder, WeightStore
from faser_backend.core.model import ModelSpec, rotary_tables
from faser_backend.manifest import TensorSpec


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
    runtime: str = "onnxruntime",
    dtype: str = "fp32",
) -> SegmentGraph:
    """Layers [first_layer, last_layer); embedding and head come with the first and the last layer.

    Exit scores are the final-norm hidden state times the head's rows of each row's candidates. Matrices,
    hidden states, keys and values have the dtype; norms, rotary embedding, logits and exit scores are float32.
    """
    graph = GraphBuilder(store, FLOAT_TYPES[dtype])
    make_attention = partial(BODIES[runtime], graph, spec, kv_block_size)
    return _SegmentBuilder(spec, weights, graph, make_attention).build(first_layer, last_layer, has_exit_scores)


class _SegmentBuilder:
    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, graph: GraphBuilder, make_attention: Callable[[], AttentionBody]
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.graph = graph
        self._make_attention = make_attention

    def build(self, first: int, last: int, has_exit_scores: bool) -> SegmentGraph:
        g, spec = self.graph, self.spec
        is_first, is_last = first == 0, last == spec.num_layers
        hidden = self._embedded() if is_first else g.input("hidden", ("T", spec.hidden_size), g.dtype)
        self._shared_inputs(is_last)
        for layer in range(first, last):
            out = "hidden_out" if layer == last - 1 and not is_last else None
            hidden = self._layer(layer, hidden, only_logit_rows=layer == spec.num_layers - 1, out=out)
        if is_last:
            normed = self._norm(hidden, "norm", self.weights.final_norm)
            g.op("Gemm", normed, g.widen(self._head()), transB=1, out="logits")
            g.output("logits", ("R", spec.vocab_size))
        else:
            g.output("hidden_out", ("T", spec.hidden_size), g.dtype)
            if has_exit_scores:
                self._exit_scores("hidden_out")
        self.attention.declare_outputs(first, last)
        model = g.model(f"layers_{first}_{last}")
        return SegmentGraph(model, tuple(g.inputs), tuple(g.outputs))

    def _embedded(self) -> str:
        token_ids = self.graph.input("token_ids", ("T",))
        return self.graph.op("Gather", self.graph.matrix("embedding", self.weights.embedding), token_ids)

    def _shared_inputs(self, is_last: bool) -> None:
        g = self.graph
        g.input("positions", ("T",))
        self.attention = self._make_attention()
        self.rope_positions = g.op("Unsqueeze", "positions", g.ints(1))  # [T, 1]
        cos, sin = rotary_tables(self.spec)
        self.cos, self.sin = g.weight("rope_cos", cos), g.weight("rope_sin", sin)
        if is_last:
            g.input("logit_rows", ("R",))

    def _layer(self, layer: int, hidden: str, *, only_logit_rows: bool, out: str | None) -> str:
        g, w = self.graph, self.weights.layers[layer]
        prefix = f"layers.{layer}"
        normed = g.narrow(self._norm(hidden, f"{prefix}.input_norm", w.input_norm))
        attended = self._attention(layer, normed, w, only_logit_rows=only_logit_rows)
        if only_logit_rows:
            hidden = g.op("Gather", hidden, "logit_rows")
        hidden = g.op("Add", hidden, g.linear(attended, f"{prefix}.attention_out", w.attention_out))
        normed = g.narrow(self._norm(hidden, f"{prefix}.mlp_norm", w.mlp_norm))
        gate = g.linear(normed, f"{prefix}.gate", w.gate)
        up = g.linear(normed, f"{prefix}.up", w.up)
        gated = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        return g.op("Add", hidden, g.linear(gated, f"{prefix}.down", w.down), out=out)

    def _attention(self, layer: int, normed: str, w: LayerWeights, *, only_logit_rows: bool) -> str:
        g, spec = self.graph, self.spec
        num_heads, num_kv = spec.num_heads, spec.num_kv_heads
        qkv = g.linear(normed, f"layers.{layer}.qkv", w.qkv)
        qkv = g.op("Reshape", qkv, g.ints(0, num_heads + 2 * num_kv, 1, spec.head_dim))
        q, k, v = g.ops("Split", qkv, g.ints(num_heads, num_kv, num_kv), outs=3, axis=1)
        q, k = (g.narrow(g.op("RotaryEmbedding", g.widen(x), self.cos, self.sin, self.rope_positions)) for x in (q, k))
        return self.attention.attend(layer, q, k, v, only_logit_rows=only_logit_rows)

    def _norm(self, x: str, name: str, weight: np.ndarray) -> str:
        """Of a value of the graph's dtype, in float32."""
        g = self.graph
        return g.op("RMSNormalization", g.widen(x), g.weight(name, weight), axis=-1, epsilon=self.spec.rms_eps)

    def _head(self) -> str:
        tied = self.weights.lm_head is self.weights.embedding
        return self.graph.matrix("embedding" if tied else "lm_head", self.weights.lm_head)

    def _exit_scores(self, hidden: str) -> None:
        g = self.graph
        g.input("exit_candidates", ("T", "K"))
        normed = self._norm(hidden, "norm", self.weights.final_norm)
        rows = g.widen(g.op("Gather", self._head(), "exit_candidates"))  # [T, K, hidden_size]
        scores = g.op("MatMul", rows, g.op("Unsqueeze", normed, g.ints(2)))  # [T, K, 1]
        g.op("Squeeze", scores, g.ints(2), out="exit_scores")
        g.output("exit_scores", ("T", "K"))
