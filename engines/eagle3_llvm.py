"""EAGLE-3 heads of runtime "llvm": a weight file of the head's own, and what crosses its two segments' borders.

The segments are those of `eagle3_graph`: the first joins the target's hidden states, the second is the layer.
"""

from __future__ import annotations

from pathlib import Path

from engines.eagle3 import Eagle3Head
from engines.llvm_build import write_weights
from engines.torch_build import segment_tensors
from engines.weights import ModelWeights
from faser_backend.core.model import WeightFormat
from faser_backend.manifest import FileSpec, ModelEngine, SegmentSpec, TensorSpec


def write_llvm_head(
    head: Eagle3Head, weights: ModelWeights, target: ModelEngine, directory: Path, weight_format: WeightFormat
) -> ModelEngine:
    """Writes draft.safetensors. A head without an embedding has none there either: its target's is read.

    Raises CheckpointError for a matrix that its format cannot hold.
    """
    path = directory / "draft.safetensors"
    write_weights(path, weights, weight_format, head.token_ids)
    file, features_shape = FileSpec.of(path), ("T", target.spec.hidden_size)
    features = tuple(TensorSpec(f"aux_hidden.{layer}", "float32", features_shape) for layer in head.feature_layers)
    joined = TensorSpec("hidden_out", "float32", ("T", head.spec.hidden_size))
    inputs, outputs = segment_tensors(head.spec, 0, 1, "float32")
    hidden, next_hidden = (
        TensorSpec(name, "float32", (rows, head.spec.hidden_size))
        for name, rows in (("hidden", "T"), ("hidden_out", "R"))
    )
    segments = (
        SegmentSpec(file, 0, 0, features, (joined,)),
        SegmentSpec(file, 0, 1, (*inputs, hidden), (*outputs, next_hidden)),
    )
    return ModelEngine(head.spec, file, segments, weight_format)
