"""A thin builder for ONNX graphs, and the weight file that the segments of one model share.

Knows protobufs and names; nothing of decoders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from engines.arrays import BFLOAT16, converted_blocks
from engines.parts import Cut, Part, split_at
from faser_backend.manifest import TensorSpec

OPSET = 23
IR_VERSION = 11
WEIGHT_ALIGNMENT = 4096  # runtimes map the file: a weight starts on a page of its own
FLOAT_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # of the manifest's dtypes
_ELEMENT_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "uint8": TensorProto.UINT8,
}
_NUMPY_TYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "uint8": np.dtype(np.uint8),
}


class WeightStore:
    """Writes arrays to one file, each name once, and hands out references to them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._references: dict[str, TensorProto] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._references

    def reference(self, name: str) -> TensorProto:
        """A tensor that was added, as graphs name it."""
        return self._references[name]

    def add(self, name: str, array: np.ndarray, dtype: str = "float32") -> None:
        """Writes an array in this dtype, block by block; its name must be new.

        Raises CheckpointError for weights that are too large for the dtype.
        """
        self.add_blocks(name, array.shape, converted_blocks(name, array, _NUMPY_TYPES[dtype]), dtype)

    def add_blocks(self, name: str, shape: tuple[int, ...], blocks: Iterable[np.ndarray], dtype: str) -> None:
        """Writes an array that comes in contiguous parts of this dtype; its name must be new."""
        assert name not in self._references
        self._file.write(bytes(-self._file.tell() % WEIGHT_ALIGNMENT))
        offset = self._file.tell()
        for block in blocks:
            self._file.write(block.reshape(-1).view(np.uint8).data)
        tensor = TensorProto(name=name, dims=shape, data_type=_ELEMENT_TYPES[dtype])
        tensor.data_location = TensorProto.EXTERNAL
        length = self._file.tell() - offset
        for key, value in (("location", self.path.name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self._references[name] = tensor

    def share(self, tensor: TensorProto) -> None:
        """Lets graphs name a tensor that lies in another file of the same directory."""
        self._references[tensor.name] = tensor

    def close(self) -> None:
        self._file.close()


class GraphBuilder:
    """Collects nodes, inputs, outputs and constants of a graph.

    `dtype` is what matrices and hidden states have; what needs more is computed between `widen` and `narrow`.
    """

    INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT  # for the attribute of a Cast

    def __init__(
        self,
        store: WeightStore | None = None,
        dtype: str = "float32",
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """weights: arrays by name, each read when the first graph over the store asks for it."""
        self.dtype = dtype
        self.inputs: list[TensorSpec] = []
        self.outputs: list[TensorSpec] = []
        self._store = store
        self._weights = weights or {}
        self._nodes: list[onnx.NodeProto] = []
        self._handed_out: list[TensorSpec] = []  # since the last cut
        self._cuts: list[Cut] = []
        self._constants: dict[str, TensorProto] = {}
        self._num_values = 0

    def op(self, op_type: str, *inputs: str, domain: str = "", out: str | None = None, **attributes: Any) -> str:
        """Adds a node with one output and returns the output's name."""
        return self.ops(op_type, *inputs, domain=domain, outs=[out or self._fresh(op_type)], **attributes)[0]

    def ops(self, op_type: str, *inputs: str, outs: int | list[str], domain: str = "", **attributes: Any) -> list[str]:
        """Adds a node with several outputs; an output named "" is not computed."""
        names = [self._fresh(op_type) for _ in range(outs)] if isinstance(outs, int) else outs
        node_name = f"{op_type}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, list(inputs), names, name=node_name, domain=domain, **attributes))
        return names

    def ints(self, *values: int) -> str:
        """A 1-D int64 constant, e.g. a shape."""
        return self._small("i_" + "_".join(map(str, values)).replace("-", "m"), np.array(values, np.int64))

    def integer(self, value: int) -> str:
        """An int64 scalar."""
        return self._small(f"n_{value}".replace("-", "m"), np.array(value, np.int64))

    def scalar(self, value: float) -> str:
        """A float32 scalar."""
        return self._small(f"f_{value!r}".replace("-", "m"), np.array(value, np.float32))

    def constant(self, name: str, array: np.ndarray) -> str:
        """A small array that lies in the graph itself."""
        return self._small(name, array)

    def table(self, name: str, array: np.ndarray) -> str:
        """A computed float32 constant that lies in the shared weight file."""
        assert self._store is not None, "this graph has no weight file"
        if name not in self._store:
            self._store.add(name, array)
        return self.stored(name, "float32")

    def weight(self, name: str) -> str:
        """A weight of the model in float32, in the shared weight file."""
        return self.stored(name, "float32")

    def matrix(self, name: str) -> str:
        """A weight of the model in the graph's dtype, in the shared weight file."""
        return self.stored(name, self.dtype)

    def stored(self, name: str, dtype: str) -> str:
        """A weight of the model, or what lies in the store already, as a constant of this graph."""
        assert self._store is not None, "this graph has no weight file"
        if name not in self._store:
            self._store.add(name, self._weights[name], dtype)
        self._constants[name] = self._store.reference(name)
        return name

    def widen(self, x: str) -> str:
        """A value of the graph's dtype as float32."""
        return x if self.dtype == "float32" else self.op("Cast", x, to=_ELEMENT_TYPES["float32"])

    def narrow(self, x: str) -> str:
        """A float32 value in the graph's dtype."""
        return x if self.dtype == "float32" else self.op("Cast", x, to=_ELEMENT_TYPES[self.dtype])

    def linear(self, x: str, name: str, *, has_bias: bool = False) -> str:
        """x times the matrix [in, out] of this name, plus its bias; summed in float32."""
        product = self.product(self.widen(x), name)
        return self.narrow(self.op("Add", product, self.weight(f"{name}_bias")) if has_bias else product)

    def product(self, x: str, name: str) -> str:
        """x times the matrix [in, out] of this name, both float32.

        Compilers know a product between casts: TensorRT-RTX keeps the matrix in its dtype.
        """
        return self.op("MatMul", x, self.widen(self.matrix(name)))

    def row_products(self, x: str, name: str, out: str | None = None) -> str:
        """x times the rows of the matrix [out, in] of this name, both float32."""
        return self.op("Gemm", x, self.widen(self.matrix(name)), transB=1, out=out)

    def rows(self, name: str, indices: str) -> str:
        """Rows of the matrix of this name, in the graph's dtype."""
        return self.op("Gather", self.matrix(name), indices)

    def input(self, name: str, shape: tuple[int | str, ...], dtype: str = "int64") -> str:
        self.inputs.append(TensorSpec(name, dtype, shape))
        return name

    def output(self, name: str, shape: tuple[int | str, ...], dtype: str = "float32") -> None:
        self.outputs.append(TensorSpec(name, dtype, shape))

    def hand_out(self, value: str, name: str, shape: tuple[int | str, ...]) -> None:
        """Renames a float32 value that a node of this part made; the next cut makes it an output of the part."""
        node = next(node for node in reversed(self._nodes) if value in node.output)
        node.output[list(node.output).index(value)] = name
        self._handed_out.append(TensorSpec(name, "float32", shape))

    def cut(self, result: str, shape: tuple[int | str, ...], *, carried: tuple[int | str, ...]) -> str:
        """Ends a part of the graph: `result`, of this shape, is computed elsewhere from what was handed out.

        carried: the shape of what the next part still reads of this one.
        """
        handed_out, self._handed_out = tuple(self._handed_out), []
        self._cuts.append(Cut(len(self._nodes), handed_out, TensorSpec(result, "float32", shape), carried))
        return result

    def models(self, name: str) -> tuple[onnx.ModelProto, ...]:
        """The collected nodes, a model for each part; constants of `weight` stay in their file."""
        parts = split_at(self._cuts, self._nodes, self.inputs, self.outputs)
        return tuple(self._model(f"{name}.{index}", part) for index, part in enumerate(parts))

    def _model(self, name: str, part: Part) -> onnx.ModelProto:
        inputs, outputs = (
            [helper.make_tensor_value_info(t.name, _ELEMENT_TYPES[t.dtype], t.shape) for t in tensors]
            for tensors in (part.inputs, part.outputs)
        )
        read = {name for node in part.nodes for name in node.input}
        constants = [value for name, value in self._constants.items() if name in read]
        graph = helper.make_graph(part.nodes, name, inputs, outputs, constants)
        opsets = _opsets(*sorted({node.domain for node in part.nodes} - {""}))
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="faser")

    def _small(self, name: str, array: np.ndarray) -> str:
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def _fresh(self, op_type: str) -> str:
        self._num_values += 1
        return f"{op_type}.{self._num_values}"


def _opsets(*domains: str) -> list[onnx.OperatorSetIdProto]:
    return [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in domains)]
