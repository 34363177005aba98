"""A graph in parts: cut where something outside the graph computes a value that the rest goes on from.

Knows nodes and names; nothing of decoders. A value that is made before a cut and read behind it is carried over:
an output of the one part and an input of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from faser_backend.manifest import TensorSpec


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a part ends: the number of nodes before it, what it hands out, what comes back, and what is carried."""

    num_nodes: int
    outputs: tuple[TensorSpec, ...]
    result: TensorSpec
    carried_shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Nodes of one part, with the inputs and outputs of its border."""

    nodes: list[onnx.NodeProto]
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]


def split_at(
    cuts: Sequence[Cut], nodes: Sequence[onnx.NodeProto], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> list[Part]:
    """One part more than cuts. inputs, outputs: of the whole graph; each part has those that it reads or makes."""
    stops = [*(cut.num_nodes for cut in cuts), len(nodes)]
    parts: list[Part] = []
    made_by: dict[str, int] = {}
    start = 0
    for index, stop in enumerate(stops):
        own = list(nodes[start:stop])
        made_by |= {name: index for node in own for name in node.output if name}
        read = dict.fromkeys(name for node in own for name in node.input)
        part_inputs = [tensor for tensor in inputs if tensor.name in read]
        if index:
            part_inputs.append(cuts[index - 1].result)
            carried = [name for name in read if made_by.get(name, index) < index]
            handed_out = {tensor.name for tensor in (*cuts[index - 1].outputs, *outputs)}
            assert not handed_out.intersection(carried), f"{carried}: handed out under a name of its own and carried"
            assert all(made_by[name] == index - 1 for name in carried), f"{carried}: carried over more than one cut"
            names = {name: f"carried.{index - 1}.{place}" for place, name in enumerate(carried)}
            _rename([*parts[-1].nodes, *own], names)
            described = [TensorSpec(name, "float32", cuts[index - 1].carried_shape) for name in names.values()]
            parts[-1].outputs.extend(described)
            part_inputs.extend(described)
        part_outputs = list(cuts[index].outputs) if index < len(cuts) else []
        part_outputs += [tensor for tensor in outputs if made_by.get(tensor.name) == index]
        parts.append(Part(own, part_inputs, part_outputs))
        start = stop
    return parts


def _rename(nodes: list[onnx.NodeProto], names: dict[str, str]) -> None:
    for node in nodes:
        for values in (node.input, node.output):
            values[:] = [names.get(value, value) for value in values]
