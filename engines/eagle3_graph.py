"""The two graphs of an EAGLE-3 head, and how they are written to an engine directory.

Segment 0 joins the target's hidden states [T, hidden_size] of three layers into one. Segment 1 is the layer, which
takes such a row or its own hidden state of the step before: one entry for both. Knows no checkpoints.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx

from engines.attention import BODIES
from engines.decoder import SegmentBuilder, SegmentGraph
from engines.eagle3 import Eagle3Head
from engines.experts import EXPERT_BODIES
from engines.graph import FLOAT_TYPES, GraphBuilder, WeightStore
from engines.weights import ModelWeights
from faser_backend.manifest import FileSpec, ModelEngine, SegmentSpec

EXCLUDED = np.array([[-np.inf]], np.float32)


def write_head(
    head: Eagle3Head,
    weights: ModelWeights,
    target: ModelEngine,
    directory: Path,
    *,
    kv_block_size: int,
    runtime: str = "onnxruntime",
    dtype: str = "fp32",
    lender: ModelWeights | None = None,
) -> ModelEngine:
    """Writes both segments. A head without an embedding reads the target's, from the file that holds it, or from one of
    its own that `lender` has filled: the target's weights, where engines are compiled and hold what they read.

    runtime, dtype: as of engines.decoder.build_segment.
    """
    store = WeightStore(directory / "draft.weights")
    if "embedding" not in weights and lender is not None:
        store.add("embedding", lender["embedding"], FLOAT_TYPES[dtype])
    elif "embedding" not in weights:
        first = onnx.load(directory / target.segments[0].file.name, load_external_data=False)
        store.share(next(tensor for tensor in first.graph.initializer if tensor.name == "embedding"))
    graphs = (
        _join_graph(head, target.spec.hidden_size, GraphBuilder(store, FLOAT_TYPES[dtype], weights)),
        _HeadBuilder(head, GraphBuilder(store, FLOAT_TYPES[dtype], weights), runtime, kv_block_size).build_head(),
    )
    store.close()
    segments = []
    for index, graph in enumerate(graphs):
        files = graph.write(directory, f"draft.{index}")
        segments.append(SegmentSpec(files[0], 0, index, graph.inputs, graph.outputs, parts=files[1:]))
    return ModelEngine(head.spec, FileSpec.of(store.path), tuple(segments))


def _join_graph(head: Eagle3Head, target_hidden_size: int, graph: GraphBuilder) -> SegmentGraph:
    names = [f"aux_hidden.{layer}" for layer in head.feature_layers]
    features = [graph.input(name, ("T", target_hidden_size), graph.dtype) for name in names]
    joined = graph.linear(graph.op("Concat", *features, axis=1), "fc")
    graph.op("Identity", joined, out="hidden_out")
    graph.output("hidden_out", ("T", head.spec.hidden_size), graph.dtype)
    return SegmentGraph(graph.models("join"), tuple(graph.inputs), tuple(graph.outputs))


class _HeadBuilder(SegmentBuilder):
    """The head's layer: attention over [norm(embedding), norm(hidden)], added to the hidden state alone."""

    def __init__(self, head: Eagle3Head, graph: GraphBuilder, runtime: str, kv_block_size: int) -> None:
        make_attention = partial(BODIES[runtime], graph, head.spec, kv_block_size)
        super().__init__(head.spec, graph, make_attention, EXPERT_BODIES[runtime])
        self._token_ids = head.token_ids

    def build_head(self) -> SegmentGraph:
        """hidden_out has the logit rows alone: what the next step of each chain goes on from."""
        g, spec = self.graph, self.spec
        embedded = self._norm(self._embedded(), "layers.0.input_norm")
        hidden = g.input("hidden", ("T", spec.hidden_size), g.dtype)
        self._shared_inputs(is_last=True)
        both = g.op("Concat", embedded, self._norm(hidden, "layers.0.hidden_norm"), axis=1)  # [T, 2 * hidden_size]
        hidden = self._normed_layer(0, hidden, g.narrow(both), only_logit_rows=True, out="hidden_out")
        self._target_logits(self._norm(hidden, "norm"))
        g.output("logits", ("R", spec.vocab_size))
        g.output("hidden_out", ("R", spec.hidden_size), g.dtype)
        self.attention.declare_outputs(0, 1)
        return SegmentGraph(g.models("head"), tuple(g.inputs), tuple(g.outputs))

    def _target_logits(self, normed: str) -> None:
        """logits [R, vocab_size]: the head's logits at the ids that it knows, -inf at all others.

        Over the target's ids, because noise, penalties and filters are keyed by those: a sampler that shares them
        with the target then needs to know nothing of heads.
        """
        g, num_ids = self.graph, self._token_ids.size
        places = np.full(self.spec.vocab_size, num_ids, np.int64)
        is_real = self._token_ids < self.spec.vocab_size  # padding rows of the vocabulary have been cut
        places[self._token_ids[is_real]] = np.flatnonzero(is_real)
        is_whole = np.array_equal(places, np.arange(num_ids))
        logits = g.row_products(normed, self._head_name, out="logits" if is_whole else None)
        if is_whole:
            return
        num_rows = g.op("Concat", g.op("Shape", "logit_rows"), g.ints(1), axis=0)
        excluded = g.op("Expand", g.constant("excluded", EXCLUDED), num_rows)  # [R, 1]
        padded = g.op("Concat", logits, excluded, axis=1)
        g.op("Gather", padded, g.constant("places", places), axis=1, out="logits")
