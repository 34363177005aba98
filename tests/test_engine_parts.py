"""Graphs cut into parts: what crosses a border, and that the parts together compute what the whole would."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from engines.graph import GraphBuilder
from engines.parts import Cut, Part, split_at
from faser_backend.manifest import TensorSpec

WIDTH = 4


def tensor(name: str) -> TensorSpec:
    return TensorSpec(name, "float32", ("T", WIDTH))


def add(a: str, b: str, out: str) -> onnx.NodeProto:
    return helper.make_node("Add", [a, b], [out])


def cut(num_nodes: int, given: str, result: str) -> Cut:
    return Cut(num_nodes, (tensor(given),), tensor(result), ("T", WIDTH))


def names(tensors: list[TensorSpec]) -> list[str]:
    return [tensor.name for tensor in tensors]


def edges(part: Part) -> list[tuple[list[str], list[str]]]:
    return [(list(node.input), list(node.output)) for node in part.nodes]


def test_without_a_cut_the_graph_is_one_part():
    nodes = [add("x", "x", "y")]
    [part] = split_at([], nodes, [tensor("x")], [tensor("y")])
    assert (part.nodes, names(part.inputs), names(part.outputs)) == (nodes, ["x"], ["y"])


def test_what_is_read_behind_a_cut_is_carried_over_it():
    nodes = [add("x", "x", "h"), add("h", "x", "q"), add("h", "a", "y")]
    before, after = split_at([cut(2, "q", "a")], nodes, [tensor("x")], [tensor("y")])
    assert (names(before.inputs), names(before.outputs)) == (["x"], ["q", "carried.0.0"])
    assert (names(after.inputs), names(after.outputs)) == (["a", "carried.0.0"], ["y"])
    assert edges(before) == [(["x", "x"], ["carried.0.0"]), (["carried.0.0", "x"], ["q"])]
    assert edges(after) == [(["carried.0.0", "a"], ["y"])]
    assert before.outputs[1] == TensorSpec("carried.0.0", "float32", ("T", WIDTH)) == after.inputs[1]


def test_each_of_several_values_is_carried_once():
    nodes = [add("x", "x", "g"), add("g", "x", "h"), add("h", "a", "i"), add("h", "g", "j"), add("i", "j", "y")]
    before, after = split_at([cut(2, "x", "a")], nodes, [tensor("x")], [tensor("y")])
    assert sorted(set(names(after.inputs)) - {"a"}) == ["carried.0.0", "carried.0.1"]
    assert names(before.outputs)[1:] == names(after.inputs)[1:]


def test_every_cut_has_names_of_its_own():
    nodes = [add("x", "x", "h"), add("h", "a", "i"), add("i", "b", "y")]
    parts = split_at([cut(1, "x", "a"), cut(2, "x", "b")], nodes, [tensor("x")], [tensor("y")])
    assert [names(part.inputs) for part in parts] == [["x"], ["a", "carried.0.0"], ["b", "carried.1.0"]]
    assert edges(parts[1]) == [(["carried.0.0", "a"], ["carried.1.0"])]


def test_nothing_is_carried_over_two_cuts():
    nodes = [add("x", "x", "h"), add("x", "a", "i"), add("h", "b", "y")]
    with pytest.raises(AssertionError, match=r"\['h'\]: carried over more than one cut"):
        split_at([cut(1, "x", "a"), cut(2, "i", "b")], nodes, [tensor("x")], [tensor("y")])


def test_inputs_of_the_graph_go_to_every_part_that_reads_them_and_to_no_other():
    nodes = [add("x", "x", "h"), add("h", "a", "i"), add("i", "x", "j"), add("j", "z", "y")]
    inputs = [tensor(name) for name in ("z", "x", "unread")]
    parts = split_at([cut(1, "x", "a"), cut(2, "x", "b")], nodes, inputs, [tensor("y")])
    assert [names(part.inputs) for part in parts] == [["x"], ["a", "carried.0.0"], ["z", "x", "b", "carried.1.0"]]


def test_outputs_of_the_graph_come_from_the_part_that_makes_them():
    nodes = [add("x", "x", "early"), add("x", "early", "q"), add("x", "a", "h"), add("h", "x", "late")]
    parts = split_at([cut(2, "q", "a")], nodes, [tensor("x")], [tensor("late"), tensor("early")])
    assert [names(part.outputs) for part in parts] == [["q", "early"], ["late"]]


def test_the_parts_and_what_is_computed_between_them_make_the_whole():
    """Three layers like a decoder's: what is handed out is squared outside, the hidden state is carried past it."""
    g = GraphBuilder()
    hidden = g.input("x", ("T", WIDTH), "float32")
    bias = g.constant("bias", np.arange(WIDTH, dtype=np.float32))
    for layer in range(3):
        g.hand_out(g.op("Add", hidden, bias), f"q.{layer}", ("T", WIDTH))
        squared = g.cut(f"attended.{layer}", ("T", WIDTH), carried=("T", WIDTH))
        if layer == 1:
            g.op("Identity", hidden, out="seen")  # behind the cut, of what lies before it
            g.output("seen", ("T", WIDTH))
        hidden = g.op("Add", hidden, squared, out="y" if layer == 2 else None)
    g.output("y", ("T", WIDTH))
    x = np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float32)
    values: dict[str, np.ndarray] = {"x": x}
    models = g.models("layers")
    for part, model in enumerate(models):
        onnx.checker.check_model(model, full_check=True)
        assert bool(model.graph.initializer) == (part < 3), "constants lie where they are read"
        if part:
            values[f"attended.{part - 1}"] = values[f"q.{part - 1}"] ** 2
        given = {value.name: values[value.name] for value in model.graph.input}
        made = ReferenceEvaluator(model).run(None, given)
        values |= {value.name: np.asarray(y) for value, y in zip(model.graph.output, made, strict=True)}
    expected, before = x, []
    for _ in range(3):
        before.append(expected)
        expected = expected + (expected + np.arange(WIDTH, dtype=np.float32)) ** 2
    assert len(models) == 4
    np.testing.assert_array_equal(values["y"], expected)
    np.testing.assert_array_equal(values["seen"], before[1])
