"""Where the programs of a runner come from: weights for runtime torch, engine files for TensorRT; each loaded once.

All shares of the device use the same weights and engines. Knows nothing of streams, pools or runners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from faser_backend.device.cuda.segment import CallBounds, SegmentProgram
from faser_backend.device.cuda.torch_head import TorchHeadLayer, TorchJoin
from faser_backend.device.cuda.torch_segment import TorchSegment
from faser_backend.device.cuda.torch_weights import HeadTensors, ModelTensors, load_head, load_weights
from faser_backend.manifest import BucketSpec, FileSpec, ModelEngine, SegmentSpec

if TYPE_CHECKING:
    from faser_backend.device.cuda.tensorrt_engine import EngineStore

UNBOUNDED = 1 << 30
DIMENSIONS = ("T", "B", "Q", "MB", "R", "K")  # of manifests, in the order of CallBounds


class ProgramSource(Protocol):
    """Programs of the models of one engine."""

    def open(self, model: ModelEngine, split: str, num_sms: int) -> Sequence[SegmentProgram]:
        """One per segment, in order, for a share of num_sms SMs; split: of which it is one, "" for the whole
        device. Raises ConfigError where they cannot be loaded."""
        ...

    def limits(self, model: ModelEngine, split: str) -> CallBounds | None:
        """The largest calls that they take; None = any."""
        ...

    def num_unloaded_bytes(self, models: Sequence[ModelEngine]) -> int:
        """Device memory that the models' weights are still going to take."""
        ...

    def close(self) -> None: ...


class TorchPrograms:
    """Programs of runtime torch. `load` reads, or makes, the weights of a model on the device; models are told apart
    by their files."""

    def __init__(self, load: Callable[[ModelEngine], ModelTensors | HeadTensors]) -> None:
        self._load = load
        self._weights: dict[tuple[FileSpec, ...], ModelTensors | HeadTensors] = {}

    @classmethod
    def of_directory(
        cls, engine_dir: Path, dtype: str, device: torch.device, target: ModelEngine | None = None
    ) -> TorchPrograms:
        """dtype: of the manifest. target: whose embedding a head without one of its own reads."""

        def load(model: ModelEngine) -> ModelTensors | HeadTensors:
            path = engine_dir / model.segments[0].file.name
            if model.spec.reads_target:
                return load_head(path, model.spec, dtype, device, lent_embedding)
            return load_weights(path, model.spec, dtype, device)

        def lent_embedding() -> torch.Tensor:
            assert target is not None, "a head without an embedding has a target"
            weights = programs.weights(target)
            assert isinstance(weights, ModelTensors)
            return weights.embedding

        programs = cls(load)
        return programs

    def open(self, model: ModelEngine, split: str, num_sms: int) -> Sequence[SegmentProgram]:
        weights = self.weights(model)
        if isinstance(weights, ModelTensors):
            return [TorchSegment(model.spec, segment, weights, num_sms) for segment in model.segments]
        join, layer = model.segments
        return [TorchJoin(join, weights), TorchHeadLayer(model.spec, layer, weights, num_sms)]

    def weights(self, model: ModelEngine) -> ModelTensors | HeadTensors:
        """Loaded when they are first asked for."""
        if model.files not in self._weights:
            self._weights[model.files] = self._load(model)
        return self._weights[model.files]

    def limits(self, model: ModelEngine, split: str) -> CallBounds | None:
        """Kernels of ours take any call."""

    def num_unloaded_bytes(self, models: Sequence[ModelEngine]) -> int:
        return sum(model.num_weight_bytes for model in models if model.files not in self._weights)

    def close(self) -> None:
        self._weights.clear()


class TensorRtPrograms:
    """Programs of the runtimes "tensorrt" and "tensorrt_rtx"."""

    def __init__(self, engine_dir: Path, runtime: str, device: torch.device, compiler: str) -> None:
        """compiler: of the manifest. Raises TensorRtError where the runtime's TensorRT is not installed, or is not
        the one that built the engines."""
        from faser_backend.device.cuda.tensorrt_engine import EngineStore

        self._engine_dir = engine_dir
        self._device = device
        self._store: EngineStore = EngineStore(runtime)
        self._store.tensorrt.check_built_by(compiler)
        self._opened: set[tuple[FileSpec, ...]] = set()

    def open(self, model: ModelEngine, split: str, num_sms: int) -> Sequence[SegmentProgram]:
        from faser_backend.device.cuda.tensorrt_segment import open_segments

        profiles = profiles_of_split(model.segments[0].buckets, split)
        programs = open_segments(model, self._engine_dir, self._store, self._device, profiles)
        self._opened.add(model.files)
        return programs

    def limits(self, model: ModelEngine, split: str) -> CallBounds | None:
        return bucket_limits(model.segments, split)

    def num_unloaded_bytes(self, models: Sequence[ModelEngine]) -> int:
        return sum(model.num_weight_bytes for model in models if model.files not in self._opened)

    def close(self) -> None:
        self._store.close()
        self._opened.clear()


def profiles_of_split(buckets: Sequence[BucketSpec], split: str) -> list[int] | None:
    """Indices of the profiles that a share of this split may run: its own where there are any, else those of no
    split. None: any, where the manifest tells of no buckets."""
    own = [index for index, bucket in enumerate(buckets) if bucket.split == split]
    return (own or [index for index, bucket in enumerate(buckets) if not bucket.split]) if buckets else None


def bucket_limits(segments: Sequence[SegmentSpec], split: str) -> CallBounds | None:
    """The largest call that all segments have a profile for, dimension by dimension; None without buckets."""
    if not all(segment.buckets for segment in segments):
        return None
    limits = dict.fromkeys(DIMENSIONS, UNBOUNDED)
    for segment in segments:
        profiles = profiles_of_split(segment.buckets, split) or ()
        for dimension in DIMENSIONS:
            known = [
                segment.buckets[i].ranges[dimension][2] for i in profiles if dimension in segment.buckets[i].ranges
            ]
            limits[dimension] = min([limits[dimension], *([max(known)] if known else [])])
    return CallBounds._make(limits.values())
