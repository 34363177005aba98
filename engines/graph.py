"""A thin builder for ONNX graphs, and the weight file that the segments of one model share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from faser_backend.engines.checkpoint import converted_blocks
from faser_backend.manifest import TensorSpec

OPSET = 23
IR_VERSION = 11
WEIGHT_ALIGNMENT = 4096  # runtimes map the file, so each weight starts on a new page
_ELEMENT_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
}


class WeightStore:
    """A file of arrays, each name once, to which graphs refer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self.references: dict[str, TensorProto] = {}  # of the tensors that were added, by name

    def add(self, name: str, array: np.ndarray, dtype: str = "float32") -> None:
        """Writes an array in this dtype, block by block. Its name must be new.

        Raises CheckpointError for numbers that are too large for the dtype.
        """
        assert name not in self.references
        self._file.write(bytes(-self._file.tell() % WEIGHT_ALIGNMENT))
        offset = self._file.tell()
        for block in converted_blocks(name, array, np.dtype(dtype)):
            self._file.write(block.reshape(-1).view(np.uint8).data)
        tensor = TensorProto(name=name, dims=array.shape, data_type=_ELEMENT_TYPES[dtype])
        tensor.data_location = TensorProto.EXTERNAL
        length = self._file.tell() - offset
        for key, value in (("location", self.path.name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.references[name] = tensor

    def close(self) -> None:
        self._file.close()


class GraphBuilder:
    """A graph under construction: nodes, inputs, outputs and constants.

    Matrices and hidden states have `dtype`. Operations that need float32 are placed between `widen` and `narrow`.
    """

    def __init__(self, store: WeightStore, dtype: str, weights: Mapping[str, np.ndarray]) -> None:
        """weights: arrays by name, each read when the first graph over the store uses it."""
        self.dtype = dtype
        self.inputs: list[TensorSpec] = []
        self.outputs: list[TensorSpec] = []
        self._store = store
        self._weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, TensorProto] = {}
        self._num_values = 0

    def op(self, op_type: str, *inputs: str, domain: str = "", out: str | None = None, **attributes: Any) -> str:
        """Adds a node with one output and returns the output's name."""
        return self.ops(op_type, *inputs, domain=domain, outs=[out or self._fresh(op_type)], **attributes)[0]

    def ops(self, op_type: str, *inputs: str, outs: int | list[str], domain: str = "", **attributes: Any) -> list[str]:
        """Adds a node with several outputs and returns their names. An output named "" is not computed."""
        names = [self._fresh(op_type) for _ in range(outs)] if isinstance(outs, int) else outs
        node_name = f"{op_type}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, list(inputs), names, name=node_name, domain=domain, **attributes))
        return names

    def ints(self, *values: int) -> str:
        """Adds a 1-D int64 constant, e.g. a shape."""
        return self.constant("i_" + "_".join(map(str, values)).replace("-", "m"), np.array(values, np.int64))

    def integer(self, value: int) -> str:
        """Adds an int64 scalar."""
        return self.constant(f"n_{value}".replace("-", "m"), np.array(value, np.int64))

    def constant(self, name: str, array: np.ndarray) -> str:
        """Adds a small array to the graph itself."""
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def table(self, name: str, array: np.ndarray) -> str:
        """Adds a computed float32 constant to the shared weight file."""
        if name not in self._store.references:
            self._store.add(name, array)
        return self.weight(name)

    def weight(self, name: str, dtype: str = "float32") -> str:
        """Adds a weight of the model, or an array of the shared weight file, as a constant of this graph."""
        if name not in self._store.references:
            self._store.add(name, self._weights[name], dtype)
        self._constants[name] = self._store.references[name]
        return name

    def widen(self, x: str) -> str:
        """Converts a value of the graph's dtype to float32."""
        return x if self.dtype == "float32" else self.op("Cast", x, to=_ELEMENT_TYPES["float32"])

    def narrow(self, x: str) -> str:
        """Converts a float32 value to the graph's dtype."""
        return x if self.dtype == "float32" else self.op("Cast", x, to=_ELEMENT_TYPES[self.dtype])

    def linear(self, x: str, name: str, *, has_bias: bool = False) -> str:
        """Multiplies x by the matrix [in, out] of this name and adds its bias; summed in float32.

        Compilers fuse a product between casts: TensorRT-RTX keeps the matrix in its dtype.
        """
        product = self.op("MatMul", self.widen(x), self.widen(self.weight(name, self.dtype)))
        return self.narrow(self.op("Add", product, self.weight(f"{name}_bias")) if has_bias else product)

    def row_products(self, x: str, name: str, out: str | None = None) -> str:
        """Multiplies x by the rows of the matrix [out, in] of this name, in float32."""
        return self.op("Gemm", x, self.widen(self.weight(name, self.dtype)), transB=1, out=out)

    def rows(self, name: str, indices: str) -> str:
        """Gathers rows of the matrix of this name, in the graph's dtype."""
        return self.op("Gather", self.weight(name, self.dtype), indices)

    def input(self, name: str, shape: tuple[int | str, ...], dtype: str = "int64") -> str:
        self.inputs.append(TensorSpec(name, dtype, shape))
        return name

    def output(self, name: str, shape: tuple[int | str, ...], dtype: str = "float32") -> None:
        self.outputs.append(TensorSpec(name, dtype, shape))

    def model(self, name: str) -> onnx.ModelProto:
        """Returns the finished graph. Constants of `weight` stay in their file."""
        inputs, outputs = (
            [helper.make_tensor_value_info(t.name, _ELEMENT_TYPES[t.dtype], t.shape) for t in tensors]
            for tensors in (self.inputs, self.outputs)
        )
        graph = helper.make_graph(self._nodes, name, inputs, outputs, list(self._constants.values()))
        domains = sorted({node.domain for node in self._nodes} - {""})
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="faser")

    def _fresh(self, op_type: str) -> str:
        self._num_values += 1
        return f"{op_type}.{self._num_values}"
