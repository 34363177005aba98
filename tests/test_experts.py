"""Experts: rows reach the experts that they chose and no others, whatever the choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from engines.experts import chosen_experts, every_expert
from engines.graph import GraphBuilder, WeightStore
from faser_backend.core.model import ModelSpec

HIDDEN, INNER, NUM_EXPERTS = 8, 6, 5


def make_spec(num_chosen: int, *, is_normalized: bool = True) -> ModelSpec:
    return ModelSpec(
        num_layers=1,
        hidden_size=HIDDEN,
        num_heads=1,
        num_kv_heads=1,
        head_dim=HIDDEN,
        intermediate_size=INNER,
        vocab_size=1,
        max_context=1,
        rope_theta=1.0,
        rms_eps=0.0,
        tie_word_embeddings=True,
        num_experts=NUM_EXPERTS,
        num_experts_per_token=num_chosen,
        has_normalized_routing=is_normalized,
    )


class Layer:
    """One layer's experts as a graph of their own; `rows_of_experts` are what each of them is given."""

    def __init__(self, spec: ModelSpec, directory: Path, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        shapes = {"router": (HIDDEN, NUM_EXPERTS)}
        for expert in range(NUM_EXPERTS):
            shapes |= {f"experts.{expert}.{name}": (HIDDEN, INNER) for name in ("gate", "up")}
            shapes[f"experts.{expert}.down"] = (INNER, HIDDEN)
        self.spec = spec
        self.weights = {f"x.{name}": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        store = WeightStore(directory / "weights")
        graph = GraphBuilder(store, weights=self.weights)
        graph.input("rows", ("T", HIDDEN), "float32")
        graph.op("Identity", chosen_experts(graph, spec, "x", "rows"), out="mixed")
        graph.output("mixed", ("T", HIDDEN))
        model = graph.models("experts")[0]
        store.close()
        [split] = [node for node in model.graph.node if node.op_type == "Split"]
        self._parts = list(split.output)
        for part in self._parts:
            model.graph.output.append(
                onnx.helper.make_tensor_value_info(part, onnx.TensorProto.FLOAT, (f"rows of {part}", HIDDEN))
            )
        path = directory / "experts.onnx"
        onnx.save(model, path)
        onnx.checker.check_model(path)
        self._session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(self, rows: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        mixed, *parts = self._session.run(["mixed", *self._parts], {"rows": rows})
        return np.asarray(mixed), [np.asarray(part) for part in parts]

    def reference(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mixed outputs, and [T, num_chosen] the experts of each row; one row and one expert at a time."""
        mixed, chosen = np.zeros_like(rows), np.zeros((len(rows), self.spec.num_experts_per_token), int)
        for index, row in enumerate(rows):
            logits = row @ self.weights["x.router"]
            chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            chosen[index] = np.argsort(-chances)[: self.spec.num_experts_per_token]
            total = chances[chosen[index]].sum() if self.spec.has_normalized_routing else 1.0
            for expert in chosen[index]:
                gate, up, down = (self.weights[f"x.experts.{expert}.{name}"] for name in ("gate", "up", "down"))
                gated = row @ gate
                mixed[index] += chances[expert] / total * ((gated / (1 + np.exp(-gated)) * (row @ up)) @ down)
        return mixed, chosen


def random_rows(num_rows: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, HIDDEN)).astype(np.float32)


def run_joined(layer: Layer, directory: Path, rows: np.ndarray) -> np.ndarray:
    """The same experts side by side, all of them computed."""
    weights = {"x.router": layer.weights["x.router"]}
    for name, axis in (("gate", 1), ("up", 1), ("down", 0)):
        parts = [layer.weights[f"x.experts.{expert}.{name}"] for expert in range(NUM_EXPERTS)]
        weights[f"x.experts.{name}"] = np.concatenate(parts, axis)
    store = WeightStore(directory / "joined.weights")
    graph = GraphBuilder(store, weights=weights)
    graph.input("rows", ("T", HIDDEN), "float32")
    graph.op("Identity", every_expert(graph, layer.spec, "x", "rows"), out="mixed")
    graph.output("mixed", ("T", HIDDEN))
    onnx.save(graph.models("joined")[0], directory / "joined.onnx")
    store.close()
    session = ort.InferenceSession(directory / "joined.onnx", providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["mixed"], {"rows": rows})[0])


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("num_chosen", [1, 2, NUM_EXPERTS])
def test_mixed_outputs_equal_one_row_at_a_time(num_chosen: int, is_normalized: bool, tmp_path: Path) -> None:
    layer = Layer(make_spec(num_chosen, is_normalized=is_normalized), tmp_path)
    for num_rows in (1, 2, 7, 40):
        rows = random_rows(num_rows)
        wanted = layer.reference(rows)[0]
        np.testing.assert_allclose(layer.run(rows)[0], wanted, atol=1e-4)
        np.testing.assert_allclose(run_joined(layer, tmp_path, rows), wanted, atol=1e-4)


def test_an_expert_is_given_the_rows_that_chose_it_and_no_others(tmp_path: Path) -> None:
    layer = Layer(make_spec(2), tmp_path)
    rows = random_rows(9)
    _, chosen = layer.reference(rows)
    for expert, part in enumerate(layer.run(rows)[1]):
        np.testing.assert_array_equal(part, rows[(chosen == expert).any(axis=1)])


def test_an_expert_that_nobody_chose_is_given_no_rows(tmp_path: Path) -> None:
    layer = Layer(make_spec(2), tmp_path)
    _, parts = layer.run(random_rows(1))
    assert sorted(len(part) for part in parts) == [0, 0, 0, 1, 1]
    _, parts = layer.run(random_rows(0))
    assert [part.shape for part in parts] == [(0, HIDDEN)] * NUM_EXPERTS


def test_a_row_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    layer = Layer(make_spec(2), tmp_path)
    rows = random_rows(12)
    together = layer.run(rows)[0]
    alone: list[Any] = [layer.run(rows[i : i + 1])[0][0] for i in range(12)]
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-5)
    order = np.random.default_rng(0).permutation(12)
    np.testing.assert_allclose(layer.run(rows[order])[0], together[order], atol=1e-5)
