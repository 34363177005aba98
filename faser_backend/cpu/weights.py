"""The weight file of runtime "llvm", and the tables of offsets with which a segment's kernel reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from faser_backend.core.model import ModelSpec
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import ModelEngine, SegmentSpec

# A call of such a small model ends before a second thread has woken up.
ONE_THREAD_BYTES = 8 << 20

_ATTENTION = ("q", "k", "v", "attention_out")
_MLP = ("gate", "up", "down")
_VECTORS = ("input_norm", "mlp_norm", "q_bias", "k_bias", "v_bias", "attention_out_bias", "gate_bias", "up_bias")
_VECTORS += ("down_bias", "q_norm", "k_norm", "hidden_norm")


class WeightFile:
    """A mapped weight file: `data` [bytes] uint8, and the offsets of its tensors."""

    def __init__(self, path: Path) -> None:
        self.data = np.memmap(path, np.uint8, "r").view(np.ndarray)
        num_header_bytes = int.from_bytes(self.data[:8].tobytes(), "little")
        entries = json.loads(self.data[8 : 8 + num_header_bytes].tobytes())
        start = 8 + num_header_bytes
        self._spans = {name: [start + at for at in entry["data_offsets"]] for name, entry in entries.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._spans

    def offset(self, name: str) -> int:
        """Returns a tensor's offset in bytes from the beginning of the file."""
        return self._spans[name][0]

    def vector(self, name: str, dtype: type[np.generic] = np.float32) -> np.ndarray | None:
        """Returns a tensor with one axis, or None if the file has none of that name."""
        if name not in self._spans:
            return None
        first, last = self._spans[name]
        return self.data[first:last].view(dtype)


class SegmentTables(NamedTuple):
    """The tables of a segment that its kernel reads; see cpu/kernels/segment.py."""

    spec: SegmentSpec
    feature_layers: list[int]  # of this segment, rising
    matrices: np.ndarray
    vectors: np.ndarray
    vector_offsets: np.ndarray
    sizes: np.ndarray


def segment_tables(spec: ModelSpec, segment: SegmentSpec, weights: WeightFile) -> SegmentTables:
    """Builds the tables of a model's segment; a segment without layers gets empty ones."""
    layers, names = range(segment.first_layer, segment.last_layer), _matrix_names(spec)
    matrices = np.full((len(layers), len(names)), -1, np.int64)
    offsets = np.full((len(layers), len(_VECTORS) + 1), -1, np.int64)
    feature_layers = [layer for layer in layers if layer in spec.feature_layers]
    vectors = [np.zeros(0, np.float32)]
    end = 0
    for row, layer in enumerate(layers):
        matrices[row] = [weights.offset(f"layers.{layer}.{name}") for name in names]
        for column, name in enumerate(_VECTORS):
            vector = weights.vector(f"layers.{layer}.{name}")
            if vector is not None:
                offsets[row, column] = end
                vectors.append(vector)
                end += vector.size
        if layer in feature_layers:
            offsets[row, -1] = feature_layers.index(layer)
    sizes = (segment.first_layer, segment.last_layer, spec.num_layers, spec.has_normalized_routing)
    return SegmentTables(segment, feature_layers, matrices, np.concatenate(vectors), offsets, np.array(sizes, np.int64))


def _matrix_names(spec: ModelSpec) -> tuple[str, ...]:
    """Returns the names of a layer's matrices, in the kernel's order."""
    if not spec.num_experts:
        return _ATTENTION + _MLP
    return (*_ATTENTION, "router", *(f"experts.{i}.{name}" for i in range(spec.num_experts) for name in _MLP))


def useful_threads(model: ModelEngine, partition: CorePartition) -> int:
    """Returns the number of threads that speed up calls of the model on this partition."""
    return 1 if model.num_weight_bytes <= ONE_THREAD_BYTES else partition.size
