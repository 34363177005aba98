"""TensorRT-RTX segments whose engines are ONNX Runtime sessions behind TensorRT's interface, on the CPU.

An engine cannot be loaded without a GPU. To test the code around it (profiles, shapes, addresses, dtypes, pool writes),
these contexts read inputs from the addresses that were set, run the segment's graph, and write results to addresses.
"""

import ctypes
import math
from dataclasses import replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (numpy learns bfloat16)
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from faser_backend.cuda.runtime import CudaRuntime, open_on_device
from faser_backend.cuda.tensorrt_programs import EngineFile, ProfileRange, TensorRtPrograms
from faser_backend.device.runtime import ModelPair
from faser_backend.engines.decoder import GraphForm, build_segment
from faser_backend.engines.families import read_spec
from faser_backend.engines.graph import WeightStore
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.tensorrt_buckets import CallLimits, call_buckets, narrowed, shapes_of
from faser_backend.engines.tensorrt_build import TensorRtCompiler
from faser_backend.engines.weights import ModelWeights
from faser_backend.manifest import EngineManifest, FileSpec, ModelEngine, SegmentSpec
from faser_backend.plugins.tensorrt_import import ErrorLog, import_tensorrt

ACTIVATION_BYTES = 4096
LIMITS = CallLimits(max_num_seqs=8, max_context=160, max_prefill_tokens=32)


class DataType(Enum):
    FLOAT = "float32"
    HALF = "float16"
    INT32 = "int32"
    INT64 = "int64"


def write_rtx_model(
    source: Path, directory: Path, *, exit_layers: tuple[int, ...] = (), kv_block_size: int = 4, dtype: str = "fp32"
) -> ModelEngine:
    """Writes the graphs of a model's segments instead of engines, with a build's buckets."""
    checkpoint = open_checkpoint(source)
    spec = read_spec(checkpoint.fields)
    directory.mkdir(parents=True, exist_ok=True)
    store = WeightStore(directory / "weights")
    buckets = call_buckets(LIMITS.apply(spec), kv_block_size, LIMITS)
    segments = []
    for index, (first, last) in enumerate(pairwise((0, *exit_layers, spec.num_layers))):
        form = GraphForm("tensorrt_rtx", dtype, kv_block_size)
        graph = build_segment(spec, ModelWeights(checkpoint, spec), store, first, last, form=form)
        path = directory / f"target.{index}.engine"
        path.write_bytes(graph.model.SerializeToString())
        segment = SegmentSpec(FileSpec.of(path), first, last, graph.inputs, graph.outputs)
        segments.append(replace(segment, buckets=tuple(narrowed(bucket, graph.inputs) for bucket in buckets)))
    store.close()
    return ModelEngine(spec, None, tuple(segments))


class OrtEngine:
    """The part of an ICudaEngine that programs use."""

    device_memory_size_v2 = ACTIVATION_BYTES

    def __init__(self, path: Path, segment: SegmentSpec) -> None:
        self.session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.dtypes = {tensor.name: tensor.dtype for tensor in (*segment.inputs, *segment.outputs)}

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(self.dtypes[name])


class OrtContext:
    """The part of an IExecutionContext that programs use; `calls` records what was set."""

    def __init__(self, engine: OrtEngine, output_names: tuple[str, ...]) -> None:
        self._engine = engine
        self._outputs = output_names
        self.calls: list[tuple[Any, ...]] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile = -1
        self.num_runs = 0

    def set_device_memory(self, address: int, num_bytes: int) -> None:
        assert address and num_bytes >= ACTIVATION_BYTES and self.profile < 0
        self.calls.append(("memory", address))

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream
        self.profile = index
        self.shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile >= 0
        self.shapes[name] = shape
        return True

    def infer_shapes(self) -> list[str]:
        """Runs the graph on arbitrary inputs for its results' shapes."""
        feeds = {name: np.zeros(shape, self._engine.dtypes[name]) for name, shape in self.shapes.items()}
        results = self._engine.session.run(list(self._outputs), feeds)
        self.shapes |= {name: result.shape for name, result in zip(self._outputs, results, strict=True)}
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address
        self.addresses[name] = address
        return True

    def _check_apart(self) -> None:
        """Checks for overlaps: the order of TensorRT's reads and writes is undefined."""
        inputs = {name: address for name, address in self.addresses.items() if name not in self._outputs}
        for name in self._outputs:
            if math.prod(self.shapes[name]):
                shared = [other for other, address in inputs.items() if address == self.addresses[name]]
                assert not shared, f"{name} is written where {shared} are read"

    def execute_async_v3(self, stream: int) -> bool:
        assert stream and set(self.addresses) == set(self.shapes)
        self._check_apart()
        inputs = [node.name for node in self._engine.session.get_inputs()]
        results = self._engine.session.run(list(self._outputs), {name: self._at(name) for name in inputs})
        for name, result in zip(self._outputs, results, strict=True):
            self._at(name)[...] = result
        self.num_runs += 1
        return True

    def _at(self, name: str) -> np.ndarray:
        """Returns the memory at a tensor's address as a view."""
        dtype = np.dtype(self._engine.dtypes[name])
        num_bytes = int(np.prod(self.shapes[name])) * dtype.itemsize
        memory = (ctypes.c_uint8 * num_bytes).from_address(self.addresses[name])
        return np.frombuffer(memory, dtype).reshape(self.shapes[name])


class OrtStore:
    """The parts of an EngineStore that programs use."""

    def __init__(self, directory: Path, *models: ModelEngine) -> None:
        self.log = ErrorLog(import_tensorrt("rtx"))
        self.contexts: list[OrtContext] = []
        self.is_captured: list[bool] = []
        segments = (segment for model in models for segment in model.segments)
        self._segments = {directory / segment.file.name: segment for segment in segments}
        self._files: dict[Path, EngineFile] = {}

    def open(self, path: Path) -> EngineFile:
        if path not in self._files:
            segment = self._segments[path]
            inputs, outputs = ([tensor.name for tensor in side] for side in (segment.inputs, segment.outputs))
            profiles = []
            for index, bucket in enumerate(segment.buckets):
                shapes = [shapes_of(tensor, bucket) for tensor in segment.inputs]
                sizes = (dict(zip(inputs, each, strict=True)) for each in zip(*shapes, strict=True))
                profiles.append(ProfileRange(index, *sizes))
            engine = OrtEngine(path, segment)
            self._files[path] = EngineFile(path, engine, tuple(inputs), tuple(outputs), tuple(profiles))
        return self._files[path]

    def activation_memory(self, files: list[EngineFile], device: torch.device) -> torch.Tensor:
        assert all(file.activation_bytes == ACTIVATION_BYTES for file in files)
        return torch.empty(ACTIVATION_BYTES, dtype=torch.uint8, device=device)

    def new_context(self, file: EngineFile, *, is_captured: bool) -> OrtContext:
        context = OrtContext(file.engine, file.outputs)
        self.contexts.append(context)
        self.is_captured.append(is_captured)
        return context

    def close(self) -> None:
        self._files.clear()


class OrtPrograms(TensorRtPrograms):
    """Programs of an engine directory built under `graphs_are_engines`."""

    def __init__(self, engine_dir: Path, models: ModelPair) -> None:
        store: Any = OrtStore(engine_dir, *models.present)
        self._engine_dir, self._device, self._store, self._opened = engine_dir, torch.device("cpu"), store, set()


def graphs_are_engines(patch: pytest.MonkeyPatch) -> None:
    """Makes builds of runtime "tensorrt_rtx" write a segment's graph with its weights instead of an engine, and runs it
    on the CPU."""

    def write_graph(self: TensorRtCompiler, onnx_path: Path, segment: Any, buckets: Any, path: Path) -> None:
        path.write_bytes(onnx.load(onnx_path).SerializeToString())

    def open_runtime(engine_dir: Path, manifest: EngineManifest) -> CudaRuntime:
        models = ModelPair(manifest.target, manifest.draft)
        return open_on_device(OrtPrograms(engine_dir, models), models, manifest.kv_block_size, dtype=manifest.dtype)

    patch.setattr(TensorRtCompiler, "compile_segment", write_graph)
    patch.setattr("faser_backend.cuda.tensorrt_programs.current_stream", lambda: 7)
    patch.setattr("faser_backend.cuda.runtime.open_cuda_runtime", open_runtime)
