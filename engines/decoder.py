"""The decoder, once: layers [first, last) of a model as an ONNX graph over packed rows.

Rows (T) are tokens of any sequences, packed; only attention knows sequences. The last layer of the
last segment computes attention output and MLP for the logit rows alone, so prefill, which wants no
logits, pays there for keys and values only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx

from engines.attention import BODIES, AttentionBody
from engines.experts import EXPERT_BODIES, ExpertBody, gated_mlp
from engines.graph import FLOAT_TYPES, GraphBuilder, WeightStore
from engines.weight_formats import graph_builder
from engines.weights import ModelWeights
from faser_backend.core.model import ModelSpec, rotary_tables
from faser_backend.manifest import FileSpec, TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGraph:
    """A segment that can be written to disk: its models, more than one where it is cut, and what crosses its border."""

    models: tuple[onnx.ModelProto, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def write(self, directory: Path, name: str) -> tuple[FileSpec, ...]:
        """NAME.onnx, and NAME.1.onnx, ... for what lies behind the cuts."""
        paths = [directory / (f"{name}.{part}.onnx" if part else f"{name}.onnx") for part in range(len(self.models))]
        for path, model in zip(paths, self.models, strict=True):
            path.write_bytes(model.SerializeToString())
        return tuple(map(FileSpec.of, paths))


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
    weight_format: str = "fp32",
) -> SegmentGraph:
    """Layers [first_layer, last_layer); embedding and head come with the first and the last layer.

    The input of a layer among spec.feature_layers is an output too, aux_hidden.LAYER [T, hidden_size].
    Exit scores are the final-norm hidden state times the head's rows of each row's candidates. Matrices,
    hidden states, keys and values have the dtype; norms, rotary embedding, logits and exit scores are float32.
    weight_format: how matrices are stored where the dtype is fp32, see engines.weight_formats.
    """
    graph = graph_builder(weight_format, store, FLOAT_TYPES[dtype], weights)
    make_attention = partial(BODIES[runtime], graph, spec, kv_block_size)
    builder = SegmentBuilder(spec, graph, make_attention, EXPERT_BODIES[runtime])
    return builder.build(first_layer, last_layer, has_exit_scores)


class SegmentBuilder:
    """The parts of a decoder as nodes of one graph."""

    def __init__(
        self,
        spec: ModelSpec,
        graph: GraphBuilder,
        make_attention: Callable[[], AttentionBody],
        mix_experts: ExpertBody,
    ) -> None:
        self.spec = spec
        self.graph = graph
        self._make_attention = make_attention
        self._mix_experts = mix_experts

    def build(self, first: int, last: int, has_exit_scores: bool) -> SegmentGraph:
        g, spec = self.graph, self.spec
        is_first, is_last = first == 0, last == spec.num_layers
        hidden = self._embedded() if is_first else g.input("hidden", ("T", spec.hidden_size), g.dtype)
        self._shared_inputs(is_last)
        for layer in range(first, last):
            if layer in spec.feature_layers:
                g.op("Identity", hidden, out=f"aux_hidden.{layer}")
            out = "hidden_out" if layer == last - 1 and not is_last else None
            hidden = self._layer(layer, hidden, only_logit_rows=layer == spec.num_layers - 1, out=out)
        if is_last:
            normed = self._norm(hidden, "norm")
            g.row_products(normed, self._head_name, out="logits")
            g.output("logits", ("R", spec.vocab_size))
        else:
            g.output("hidden_out", ("T", spec.hidden_size), g.dtype)
            if has_exit_scores:
                self._exit_scores("hidden_out")
        for layer in spec.feature_layers:
            if first <= layer < last:
                g.output(f"aux_hidden.{layer}", ("T", spec.hidden_size), g.dtype)
        self.attention.declare_outputs(first, last)
        return SegmentGraph(g.models(f"layers_{first}_{last}"), tuple(g.inputs), tuple(g.outputs))

    def _embedded(self) -> str:
        token_ids = self.graph.input("token_ids", ("T",))
        return self.graph.rows("embedding", token_ids)

    def _shared_inputs(self, is_last: bool) -> None:
        g = self.graph
        g.input("positions", ("T",))
        self.attention = self._make_attention()
        cos, sin = rotary_tables(self.spec)
        self.cos, self.sin = g.table("rope_cos", cos), g.table("rope_sin", sin)
        if is_last:
            g.input("logit_rows", ("R",))

    def _layer(self, layer: int, hidden: str, *, only_logit_rows: bool, out: str | None) -> str:
        normed = self.graph.narrow(self._norm(hidden, f"layers.{layer}.input_norm"))
        return self._normed_layer(layer, hidden, normed, only_logit_rows=only_logit_rows, out=out)

    def _normed_layer(self, layer: int, hidden: str, normed: str, *, only_logit_rows: bool, out: str | None) -> str:
        """A layer whose attention reads `normed` and whose result is added to `hidden`."""
        g, spec, prefix = self.graph, self.spec, f"layers.{layer}"
        attended = self._attention(layer, normed, only_logit_rows=only_logit_rows)
        if only_logit_rows:
            hidden = g.op("Gather", hidden, "logit_rows")
        mixed = g.linear(attended, f"{prefix}.attention_out", has_bias=spec.has_attention_out_bias)
        hidden = g.op("Add", hidden, mixed)
        normed = g.narrow(self._norm(hidden, f"{prefix}.mlp_norm"))
        if spec.num_experts:
            return g.op("Add", hidden, self._mix_experts(g, spec, prefix, normed), out=out)
        return g.op("Add", hidden, gated_mlp(g, prefix, normed, has_bias=spec.has_mlp_bias), out=out)

    def _attention(self, layer: int, normed: str, *, only_logit_rows: bool) -> str:
        g, spec, prefix = self.graph, self.spec, f"layers.{layer}"
        num_heads, num_kv = spec.num_heads, spec.num_kv_heads
        qkv = g.linear(normed, f"{prefix}.qkv", has_bias=spec.has_qkv_bias)
        qkv = g.op("Reshape", qkv, g.ints(0, num_heads + 2 * num_kv, 1, spec.head_dim))
        q, k, v = g.ops("Split", qkv, g.ints(num_heads, num_kv, num_kv), outs=3, axis=1)
        q, k = g.widen(q), g.widen(k)
        if spec.has_qk_norm:
            q, k = self._norm32(q, f"{prefix}.q_norm"), self._norm32(k, f"{prefix}.k_norm")
        positions = g.op("Unsqueeze", "positions", g.ints(1))  # [T, 1]
        q, k = (g.narrow(g.op("RotaryEmbedding", x, self.cos, self.sin, positions)) for x in (q, k))
        return self.attention.attend(layer, q, k, v, only_logit_rows=only_logit_rows)

    def _norm(self, x: str, name: str) -> str:
        """Of a value of the graph's dtype, in float32."""
        return self._norm32(self.graph.widen(x), name)

    def _norm32(self, x: str, name: str) -> str:
        """Over the last axis."""
        return self.graph.op("RMSNormalization", x, self.graph.weight(name), axis=-1, epsilon=self.spec.rms_eps)

    @property
    def _head_name(self) -> str:
        return "embedding" if self.spec.tie_word_embeddings else "lm_head"

    def _exit_scores(self, hidden: str) -> None:
        g = self.graph
        g.input("exit_candidates", ("T", "K"))
        normed = self._norm(hidden, "norm")
        rows = g.widen(g.rows(self._head_name, "exit_candidates"))  # [T, K, hidden_size]
        scores = g.op("MatMul", rows, g.op("Unsqueeze", normed, g.ints(2)))  # [T, K, 1]
        g.op("Squeeze", scores, g.ints(2), out="exit_scores")
        g.output("exit_scores", ("T", "K"))
