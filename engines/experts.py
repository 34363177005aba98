"""A layer's MLP as experts of which every row takes a few.

Where a runtime takes empty tensors, only the chosen ones compute: rows are put in the order of their experts and
split at the experts' borders, so that each expert multiplies its own rows, and one that nobody chose multiplies
none. Compilers that must know all shapes compute every expert, as one wide MLP whose activations are weighted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engines.graph import GraphBuilder
from faser_backend.core.model import ModelSpec


def gated_mlp(graph: GraphBuilder, prefix: str, x: str, *, has_bias: bool = False) -> str:
    """down(silu(gate(x)) * up(x)); the weights' names start with the prefix."""
    gate, up = (graph.linear(x, f"{prefix}.{name}", has_bias=has_bias) for name in ("gate", "up"))
    gated = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
    return graph.linear(gated, f"{prefix}.down", has_bias=has_bias)


def chosen_experts(graph: GraphBuilder, spec: ModelSpec, prefix: str, x: str) -> str:
    """x [T, hidden_size] -> the weighted sum of its experts' outputs. T * K pairs of a row and an expert, P below."""
    g, num_chosen = graph, spec.num_experts_per_token
    shares, experts = _routed(g, spec, prefix, x)
    numbers = g.op("Unsqueeze", _numbers(g, spec), g.ints(1))  # [E, 1]
    is_chosen = g.op("Equal", numbers, g.op("Reshape", experts, g.ints(1, -1)))  # [E, P]
    # NonZero goes through an expert's pairs before the next expert's: its second row sorts the pairs
    order = g.op("Gather", g.op("NonZero", is_chosen), g.integer(1))  # [P]
    counts = g.op("ReduceSum", g.op("Cast", is_chosen, to=g.INT64), g.ints(1), keepdims=0)  # [E]
    rows = g.op("Gather", x, g.op("Div", order, g.integer(num_chosen)))  # [P, hidden_size]
    parts = g.ops("Split", rows, counts, outs=spec.num_experts, axis=0)
    outputs = [gated_mlp(g, f"{prefix}.experts.{expert}", part) for expert, part in enumerate(parts)]
    sorted_outputs = g.op("Concat", *outputs, axis=0)
    by_pair = g.op("ScatterND", sorted_outputs, g.op("Unsqueeze", order, g.ints(1)), sorted_outputs)
    by_row = g.op("Reshape", by_pair, g.ints(-1, num_chosen, spec.hidden_size))  # [T, K, hidden_size]
    mixed = g.op("MatMul", g.op("Unsqueeze", shares, g.ints(1)), by_row)  # [T, 1, hidden_size]
    return g.op("Squeeze", mixed, g.ints(1))


def every_expert(graph: GraphBuilder, spec: ModelSpec, prefix: str, x: str) -> str:
    """The same with all experts side by side as one MLP: the last product sums over experts too."""
    g = graph
    shares, experts = _routed(g, spec, prefix, x)
    is_chosen = g.op("Equal", g.op("Unsqueeze", experts, g.ints(2)), _numbers(g, spec))  # [T, K, E]
    spread = g.op("Mul", g.op("Unsqueeze", shares, g.ints(2)), g.op("Cast", is_chosen, to=g.FLOAT))
    spread = g.op("ReduceSum", spread, g.ints(1), keepdims=0)  # [T, E], 0 where not chosen
    gate, up = (g.linear(x, f"{prefix}.experts.{name}") for name in ("gate", "up"))  # [T, E * inner]
    gated = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
    by_expert = g.op("Reshape", g.widen(gated), g.ints(0, spec.num_experts, spec.intermediate_size))
    weighted = g.op("Mul", by_expert, g.op("Unsqueeze", spread, g.ints(2)))  # [T, E, inner]
    flat = g.op("Reshape", weighted, g.ints(0, spec.num_experts * spec.intermediate_size))
    return g.linear(g.narrow(flat), f"{prefix}.experts.down")


ExpertBody = Callable[[GraphBuilder, ModelSpec, str, str], str]
EXPERT_BODIES: dict[str, ExpertBody] = {
    "onnxruntime": chosen_experts,
    "tensorrt_rtx": every_expert,
    "tensorrt": every_expert,
}


def _numbers(graph: GraphBuilder, spec: ModelSpec) -> str:
    return graph.constant("expert_numbers", np.arange(spec.num_experts))  # [E]


def _routed(graph: GraphBuilder, spec: ModelSpec, prefix: str, x: str) -> tuple[str, str]:
    """Shares, float32, and numbers of the experts that each row chose, [T, K]."""
    g = graph
    chances = g.op("Softmax", g.op("MatMul", g.widen(x), g.weight(f"{prefix}.router")), axis=-1)
    shares, experts = g.ops("TopK", chances, g.ints(spec.num_experts_per_token), outs=2, axis=-1)
    if spec.has_normalized_routing:
        shares = g.op("Div", shares, g.op("ReduceSum", shares, g.ints(-1), keepdims=1))
    return shares, experts
