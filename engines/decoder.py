"""Makes ONNX graphs of decoders: layers [first, last) of a model over packed rows, and an EAGLE-3 head as two graphs.

Rows (T) are tokens of any sequences; only attention distinguishes sequences. The last layer of a model computes
attention output and MLP for the logit rows only. Prefill, which needs no logits, computes only keys and values there.

Attention over a paged KV pool has a class per TensorRT runtime. In both, pruned rows are absent, the keys and values of
present rows reach the pool, and each row attends to the tokens of its sequence up to itself. TensorRT-RTX cannot
compile custom ops: its graph uses standard ops and outputs new keys and values. Full TensorRT maps the ops
`faser::AttendSplits` and `faser::CombineSplits` to the project's plugins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx

from faser_backend.core.model import ModelSpec, rotary_tables
from faser_backend.engines.checkpoint import FLOAT_TYPES
from faser_backend.engines.eagle3 import DraftHead
from faser_backend.engines.graph import GraphBuilder, WeightStore
from faser_backend.engines.weights import ModelWeights
from faser_backend.manifest import FileSpec, SegmentSpec, TensorSpec
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


@dataclass(frozen=True, slots=True)
class GraphForm:
    """The common properties of the graphs of an engine."""

    runtime: str
    dtype: str  # of matrices, hidden states, keys and values
    kv_block_size: int
    geometry: Geometry | None = None  # of the attention plugins, for runtime "tensorrt"


class AttentionBody(ABC):
    """The attention of all layers of one segment, with its inputs and outputs."""

    outputs: tuple[str, tuple[int | str, ...]]  # name and shape of a layer's new keys, and of its values

    def __init__(self, graph: GraphBuilder, spec: ModelSpec, form: GraphForm) -> None:
        self.graph = graph
        self.spec = spec
        self.geometry = form.geometry
        self.pool_shape: tuple[int | str, ...] = (spec.num_kv_heads, "NB", form.kv_block_size, spec.head_dim)
        self._declare_inputs()

    @abstractmethod
    def _declare_inputs(self) -> None:
        """Sets `outputs`, and declares the inputs that all layers share."""

    @abstractmethod
    def attend(self, layer: int, q: str, k: str, v: str, *, only_logit_rows: bool) -> str:
        """Adds a layer: rotated q [T, num_heads, 1, head_dim], k, v [T, Hkv, 1, head_dim] -> [T, num_heads * head_dim].

        only_logit_rows: the result has only the rows of the input `logit_rows`, [R, num_heads * head_dim].
        """

    def declare_outputs(self, first_layer: int, last_layer: int) -> None:
        """Declares the outputs for the layers' new keys and values."""
        name, shape = self.outputs
        for layer in range(first_layer, last_layer):
            self.graph.output(f"k_{name}.{layer}", shape, self.graph.dtype)
            self.graph.output(f"v_{name}.{layer}", shape, self.graph.dtype)

    def _pools(self, layer: int) -> list[str]:
        return [self.graph.input(f"{name}_pool.{layer}", self.pool_shape, self.graph.dtype) for name in ("k", "v")]


class GatheredAttention(AttentionBody):
    """Attention for TensorRT-RTX: masked, over the pool's blocks joined with this call's keys, in standard ops."""

    def _declare_inputs(self) -> None:
        g, self.outputs = self.graph, ("new", ("T", self.spec.num_kv_heads, self.spec.head_dim))
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


class PluginAttention(AttentionBody):
    """Attention for full TensorRT: two plugins, because TensorRT launches one kernel per plugin."""

    def _declare_inputs(self) -> None:
        g, self.outputs = self.graph, ("pool_out", self.pool_shape)
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


BODIES: dict[str, type[AttentionBody]] = {"tensorrt_rtx": GatheredAttention, "tensorrt": PluginAttention}


EXCLUDED = np.array([[-np.inf]], np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGraph:
    """A segment that can be written to disk, with its inputs and outputs."""

    model: onnx.ModelProto
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def write(self, path: Path, first_layer: int, last_layer: int) -> SegmentSpec:
        path.write_bytes(self.model.SerializeToString())
        return SegmentSpec(FileSpec.of(path), first_layer, last_layer, self.inputs, self.outputs)


def build_segment(
    spec: ModelSpec, weights: ModelWeights, store: WeightStore, first_layer: int, last_layer: int, *, form: GraphForm
) -> SegmentGraph:
    """Makes the graph of layers [first_layer, last_layer), with embedding and head at the model's ends.

    The inputs of layers in spec.feature_layers are also outputs, aux_hidden.LAYER [T, hidden_size].
    Exit scores, of all segments except the last, are the products of the hidden state behind the final norm with the
    head's rows of the candidates. Norms, rotary embedding, logits and exit scores are float32.
    """
    graph = GraphBuilder(store, FLOAT_TYPES[form.dtype], weights)
    return _SegmentBuilder(spec, graph, form).build(first_layer, last_layer)


def build_head(
    head: DraftHead, target_hidden_size: int, weights: ModelWeights, store: WeightStore, form: GraphForm
) -> tuple[SegmentGraph, SegmentGraph]:
    """Makes both segments of a head. A head without an embedding uses the one in the store.

    The first joins the target's hidden states [T, hidden_size] of three layers into one. The second is the layer, whose
    input `hidden` is a joined row, or its own hidden state of the previous step.
    """
    assert head.token_ids is not None, "block drafters have been refused"
    joining, layer = (GraphBuilder(store, FLOAT_TYPES[form.dtype], weights) for _ in range(2))
    return (
        _join_graph(head, target_hidden_size, joining),
        _HeadBuilder(head.spec, layer, form).build_layer(head.token_ids),
    )


@dataclass(eq=False)
class _SegmentBuilder:
    """A builder of a decoder's layers as nodes of one graph."""

    spec: ModelSpec
    graph: GraphBuilder
    form: GraphForm

    def build(self, first: int, last: int) -> SegmentGraph:
        g, spec = self.graph, self.spec
        is_first, is_last = first == 0, last == spec.num_layers
        hidden = self._embedded() if is_first else g.input("hidden", ("T", spec.hidden_size), g.dtype)
        self._shared_inputs(is_last)
        for layer in range(first, last):
            if layer in spec.feature_layers:
                g.op("Identity", hidden, out=f"aux_hidden.{layer}")
            out = "hidden_out" if layer == last - 1 and not is_last else None
            normed = g.narrow(self._norm(hidden, f"layers.{layer}.input_norm"))
            hidden = self._layer(layer, hidden, normed, only_logit_rows=layer == spec.num_layers - 1, out=out)
        if is_last:
            normed = self._norm(hidden, "norm")
            g.row_products(normed, self._head_name, out="logits")
            g.output("logits", ("R", spec.vocab_size))
        else:
            g.output("hidden_out", ("T", spec.hidden_size), g.dtype)
            self._exit_scores("hidden_out")
        for layer in spec.feature_layers:
            if first <= layer < last:
                g.output(f"aux_hidden.{layer}", ("T", spec.hidden_size), g.dtype)
        self.attention.declare_outputs(first, last)
        return _finished(g, f"layers_{first}_{last}")

    def _embedded(self) -> str:
        token_ids = self.graph.input("token_ids", ("T",))
        return self.graph.rows("embedding", token_ids)

    def _shared_inputs(self, is_last: bool) -> None:
        g = self.graph
        g.input("positions", ("T",))
        self.attention = BODIES[self.form.runtime](g, self.spec, self.form)
        cos, sin = rotary_tables(self.spec)
        self.cos, self.sin = g.table("rope_cos", cos), g.table("rope_sin", sin)
        if is_last:
            g.input("logit_rows", ("R",))

    def _layer(self, layer: int, hidden: str, normed: str, *, only_logit_rows: bool, out: str | None) -> str:
        """Adds a layer whose attention reads `normed` and whose result is added to `hidden`."""
        g, spec, prefix = self.graph, self.spec, f"layers.{layer}"
        attended = self._attention(layer, normed, only_logit_rows=only_logit_rows)
        if only_logit_rows:
            hidden = g.op("Gather", hidden, "logit_rows")
        mixed = g.linear(attended, f"{prefix}.attention_out", has_bias=spec.has_attention_out_bias)
        hidden = g.op("Add", hidden, mixed)
        normed = g.narrow(self._norm(hidden, f"{prefix}.mlp_norm"))
        if spec.num_experts:
            return g.op("Add", hidden, mix_experts(g, spec, prefix, normed), out=out)
        gated = _gated(g, prefix, normed, has_bias=spec.has_mlp_bias)
        return g.op("Add", hidden, g.linear(gated, f"{prefix}.down", has_bias=spec.has_mlp_bias), out=out)

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
        """Norms a value of the graph's dtype, in float32."""
        return self._norm32(self.graph.widen(x), name)

    def _norm32(self, x: str, name: str) -> str:
        """Norms a float32 value over its last axis."""
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


class _HeadBuilder(_SegmentBuilder):
    """A builder of a head's layer: attention over [norm(embedding), norm(hidden)], added to the hidden state."""

    def build_layer(self, token_ids: np.ndarray) -> SegmentGraph:
        """Makes the graph. hidden_out has only the logit rows, from which the next step of each chain continues."""
        g, spec = self.graph, self.spec
        embedded = self._norm(self._embedded(), "layers.0.input_norm")
        hidden = g.input("hidden", ("T", spec.hidden_size), g.dtype)
        self._shared_inputs(is_last=True)
        both = g.op("Concat", embedded, self._norm(hidden, "layers.0.hidden_norm"), axis=1)  # [T, 2 * hidden_size]
        hidden = self._layer(0, hidden, g.narrow(both), only_logit_rows=True, out="hidden_out")
        self._target_logits(self._norm(hidden, "norm"), token_ids)
        g.output("logits", ("R", spec.vocab_size))
        g.output("hidden_out", ("R", spec.hidden_size), g.dtype)
        self.attention.declare_outputs(0, 1)
        return _finished(g, "head")

    def _target_logits(self, normed: str, token_ids: np.ndarray) -> None:
        """Adds logits [R, vocab_size]: the head's logits at its ids, -inf at all others.

        They are over the target's ids, which noise, penalties and filters use: heads need no sampler of their own.
        """
        g, num_ids = self.graph, token_ids.size
        columns = np.full(self.spec.vocab_size, num_ids, np.int64)
        is_real = token_ids < self.spec.vocab_size  # padding rows of the vocabulary have been cut
        columns[token_ids[is_real]] = np.flatnonzero(is_real)
        is_whole = np.array_equal(columns, np.arange(num_ids))
        logits = g.row_products(normed, self._head_name, out="logits" if is_whole else None)
        if is_whole:
            return
        num_rows = g.op("Concat", g.op("Shape", "logit_rows"), g.ints(1), axis=0)
        excluded = g.op("Expand", g.constant("excluded", EXCLUDED), num_rows)  # [R, 1]
        padded = g.op("Concat", logits, excluded, axis=1)
        g.op("Gather", padded, g.constant("columns_of_ids", columns), axis=1, out="logits")


def _join_graph(head: DraftHead, target_hidden_size: int, graph: GraphBuilder) -> SegmentGraph:
    names = [f"aux_hidden.{layer}" for layer in head.feature_layers]
    features = [graph.input(name, ("T", target_hidden_size), graph.dtype) for name in names]
    joined = graph.linear(graph.op("Concat", *features, axis=1), "fc")
    graph.op("Identity", joined, out="hidden_out")
    graph.output("hidden_out", ("T", head.spec.hidden_size), graph.dtype)
    return _finished(graph, "join")


def _finished(graph: GraphBuilder, name: str) -> SegmentGraph:
    return SegmentGraph(graph.model(name), tuple(graph.inputs), tuple(graph.outputs))


def _gated(graph: GraphBuilder, prefix: str, x: str, *, has_bias: bool = False) -> str:
    """Adds silu(gate(x)) * up(x); the weights' names start with the prefix."""
    gate, up = (graph.linear(x, f"{prefix}.{name}", has_bias=has_bias) for name in ("gate", "up"))
    return graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)


def mix_experts(graph: GraphBuilder, spec: ModelSpec, prefix: str, x: str) -> str:
    """Adds the weighted sum of the outputs of each row's K chosen experts, x [T, hidden_size].

    Compilers need fixed shapes, so all experts are computed, as one wide MLP. Activations of experts that a row
    did not choose get weight 0, and the last product also sums over experts.
    """
    g = graph
    chances = g.op("Softmax", g.op("MatMul", g.widen(x), g.weight(f"{prefix}.router")), axis=-1)
    shares, experts = g.ops("TopK", chances, g.ints(spec.num_experts_per_token), outs=2, axis=-1)  # [T, K]
    if spec.has_normalized_routing:
        shares = g.op("Div", shares, g.op("ReduceSum", shares, g.ints(-1), keepdims=1))
    numbers = g.constant("expert_numbers", np.arange(spec.num_experts))  # [E]
    is_chosen = g.op("Equal", g.op("Unsqueeze", experts, g.ints(2)), numbers)  # [T, K, E]
    spread = g.op("Mul", g.op("Unsqueeze", shares, g.ints(2)), g.op("Cast", is_chosen, to=onnx.TensorProto.FLOAT))
    spread = g.op("ReduceSum", spread, g.ints(1), keepdims=0)  # [T, E], 0 where not chosen
    gated = _gated(g, f"{prefix}.experts", x)  # [T, E * inner]
    by_expert = g.op("Reshape", g.widen(gated), g.ints(0, spec.num_experts, spec.intermediate_size))
    weighted = g.op("Mul", by_expert, g.op("Unsqueeze", spread, g.ints(2)))  # [T, E, inner]
    flat = g.op("Reshape", weighted, g.ints(0, spec.num_experts * spec.intermediate_size))
    return g.linear(g.narrow(flat), f"{prefix}.experts.down")
