"""`TensorRtPrograms`: the programs of TensorRT and TensorRT-RTX, segments that these compiled.

Each prepared call has an execution context of its own, whose shapes and addresses are set once: a captured
graph stays valid only while nobody changes the context that it was captured from. Calls too large for graphs
share one. All contexts of a model work in one memory, since its calls are serial. Knows nothing of batches or shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from faser_backend.core.errors import ConfigError
from faser_backend.cuda.buffers import FEATURE_ROWS, FEATURES
from faser_backend.cuda.call_shapes import MAX_GRAPH_ROWS, UNLIMITED, CallBounds
from faser_backend.cuda.segment import Launch, SegmentProgram
from faser_backend.cuda.tensorrt_engine import EngineFile, EngineStore, ProfileRange
from faser_backend.cuda.torch_segment import feature_slots
from faser_backend.manifest import BucketSpec, FileSpec, ModelEngine, SegmentSpec
from faser_backend.plugins.kv_write import write_kv

DIMENSIONS = ("T", "B", "Q", "MB", "R", "K")  # of manifests, in the order of CallBounds
TORCH_NAMES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64"}


class TensorRtPrograms:
    """Programs of the runtimes "tensorrt" and "tensorrt_rtx"; a segment.ProgramSource."""

    def __init__(self, engine_dir: Path, runtime: str, device: torch.device, compiler: str) -> None:
        """compiler: of the manifest. Raises TensorRtError where the runtime's TensorRT is not installed, or is not
        the one that built the engines."""
        self._engine_dir = engine_dir
        self._device = device
        self._store = EngineStore(runtime)
        self._store.tensorrt.check_built_by(compiler)
        self._opened: set[tuple[FileSpec, ...]] = set()

    def open(self, model: ModelEngine, split: str, num_sms: int) -> Sequence[SegmentProgram]:
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
    split. None: any, where the manifest has no buckets."""
    own = [index for index, bucket in enumerate(buckets) if bucket.split == split]
    return (own or [index for index, bucket in enumerate(buckets) if not bucket.split]) if buckets else None


def bucket_limits(segments: Sequence[SegmentSpec], split: str) -> CallBounds | None:
    """The largest call that all segments have a profile for, dimension by dimension; None without buckets."""
    if not all(segment.buckets for segment in segments):
        return None
    limits = dict(zip(DIMENSIONS, UNLIMITED, strict=True))
    for segment in segments:
        ranges = [segment.buckets[index].ranges for index in profiles_of_split(segment.buckets, split) or ()]
        for dimension in DIMENSIONS:
            if known := [each[dimension][2] for each in ranges if dimension in each]:
                limits[dimension] = min(limits[dimension], max(known))
    return CallBounds._make(limits.values())


def open_segments(
    model: ModelEngine,
    engine_dir: Path,
    store: EngineStore,
    device: torch.device,
    profiles: Sequence[int] | None = None,
) -> list[TensorRtSegment]:
    """The segments of a model for one share of the device, in order.

    profiles: indices of those that were compiled for this share; None = all.
    Raises ConfigError where an engine cannot be loaded.
    """
    files = [store.open(engine_dir / segment.file.name) for segment in model.segments]
    memory, features = store.activation_memory(files, device), feature_names(model)
    return [
        TensorRtSegment(segment, store, file, memory, profiles, features=features)
        for segment, file in zip(model.segments, files, strict=True)
    ]


def feature_names(model: ModelEngine) -> tuple[str, ...]:
    """The hidden states that a target gives its draft head, in the order in which the pool's `features` has them."""
    tensors = (tensor for segment in model.segments for tensor in (*segment.inputs, *segment.outputs))
    return tuple(tensor.name for tensor in tensors if tensor.name.startswith(f"{FEATURE_ROWS}."))


def current_stream() -> int:
    """The CUDA stream that the calling thread queues on."""
    return torch.cuda.current_stream().cuda_stream


class TensorRtSegment:
    """Implements device.cuda.segment.SegmentProgram."""

    packs_tables = False  # a network knows its tables' widths

    def __init__(
        self,
        spec: SegmentSpec,
        store: EngineStore,
        file: EngineFile,
        memory: torch.Tensor,
        profiles: Sequence[int] | None = None,
        *,
        features: Sequence[str] = (),
    ) -> None:
        """memory: uint8, for activations; those who share it are never at work at the same time. features: names of all
        that the pool has of hidden states, in its order."""
        self.spec = spec
        self._store = store
        self._file = file
        self._memory = memory
        own = [profile for profile in file.profiles if profiles is not None and profile.index in profiles]
        self._profiles = own or file.profiles
        self._writes_pool = not any(tensor.name.startswith("k_new.") for tensor in spec.outputs)
        self._features = features
        self._large_calls: Any = None  # their context

    def prepare(self, tensors: Mapping[str, torch.Tensor], bounds: CallBounds) -> Launch:
        """See SegmentProgram. The choice of a profile is queued on the current stream. What was prepared for more
        than MAX_GRAPH_ROWS rows is queued before the next such call is prepared."""
        bound = _bound_tensors(self._file, tensors)
        apart = _apart(self._file, bound)
        bound |= apart
        shapes = {name: tuple(bound[name].shape) for name in self._file.inputs}
        profile = choose_profile(self._profiles, shapes, str(self._file.path))
        context = self._context(is_captured=bounds.num_rows <= MAX_GRAPH_ROWS)
        self._check(context.set_optimization_profile_async(profile.index, current_stream()), f"profile {profile.index}")
        for name, shape in shapes.items():
            self._check(context.set_input_shape(name, shape), f"{name} {list(shape)}")
        if missing := context.infer_shapes():
            raise ConfigError(f"{self._file.path}: shapes of {', '.join(missing)} do not follow from the inputs")
        for name, tensor in bound.items():
            _check_tensor(self._file, context, name, tensor)
            # an empty tensor has no memory, and TensorRT wants an address
            address = tensor.data_ptr() if tensor.numel() else self._memory.data_ptr()
            self._check(context.set_tensor_address(name, address), f"address of {name}")
        self._store.log.check(f"{self._file.path}: prepare")
        return self._launch(context, dict(tensors), apart)

    def _context(self, *, is_captured: bool) -> Any:
        if not is_captured and self._large_calls is not None:
            return self._large_calls
        context = self._store.new_context(self._file, is_captured=is_captured)
        context.set_device_memory(self._memory.data_ptr(), self._memory.numel())
        if not is_captured:
            self._large_calls = context
        return context

    def _check(self, was_taken: bool, what: str) -> None:
        if not was_taken:
            raise self._store.log.fail(f"{self._file.path}: {what}", "TensorRT refused it")

    def _launch(self, context: Any, tensors: dict[str, torch.Tensor], apart: dict[str, torch.Tensor]) -> Launch:
        """apart: outputs that are copied to their places afterwards."""
        layers = () if self._writes_pool else range(self.spec.first_layer, self.spec.last_layer)
        read, written = (self._kept_features(names, tensors) for names in (self._file.inputs, self._file.outputs))

        def launch() -> None:
            if read:
                slots = feature_slots(tensors["slot_mapping"], tensors[FEATURES])
                for name, kept in read.items():
                    torch.index_select(kept, 0, slots, out=tensors[name])
            if not context.execute_async_v3(current_stream()):
                raise self._store.log.fail(f"{self._file.path}: execute", "TensorRT refused the call")
            for layer in layers:
                k_new, v_new, k_pool, v_pool = (
                    tensors[f"{name}.{layer}"] for name in ("k_new", "v_new", "k_pool", "v_pool")
                )
                write_kv(k_new, v_new, tensors["slot_mapping"], k_pool, v_pool)
            if written:
                slots = feature_slots(tensors["slot_mapping"], tensors[FEATURES])
                for name, kept in written.items():
                    kept.index_copy_(0, slots, tensors[name])
            for name, made in apart.items():
                tensors[name].copy_(made)

        return launch

    def _kept_features(self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By name what the pool has of a hidden state, [slots, hidden_size]; views."""
        wanted = [name for name in names if name in self._features]
        return {name: tensors[FEATURES].flatten(0, 1)[:, self._features.index(name)] for name in wanted}


def choose_profile(
    profiles: Sequence[ProfileRange], shapes: Mapping[str, tuple[int, ...]], engine: str
) -> ProfileRange:
    """The tightest profile that takes the shapes; of equals the first.

    shapes: of every input, by name. Raises ConfigError naming the inputs that the closest profile refuses.
    """
    fitting = [profile for profile in profiles if not profile.refusals(shapes)]
    if fitting:
        return min(fitting, key=lambda profile: (profile.size, profile.index))
    closest = min((profile.refusals(shapes) for profile in profiles), key=len)
    raise ConfigError(f"{engine}: no profile takes a call with {'; '.join(closest)}; build for larger calls")


def _bound_tensors(file: EngineFile, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor of the engine by name. A pool that was written in place is bound as input and as output."""
    bound = {}
    for name in (*file.inputs, *file.outputs):
        source = name.replace("_pool_out.", "_pool.")
        if source not in tensors:
            raise ConfigError(f"{file.path}: tensor {name}: nobody provides it; build the engine again")
        bound[name] = tensors[source]
    return bound


def _apart(file: EngineFile, bound: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Room for outputs whose place is that of an input, pools aside: an engine may write the one before it has read
    the other. What a draft head makes of a row lies where its next call reads it."""
    inputs = {bound[name].data_ptr() for name in file.inputs if bound[name].numel()}
    results = [name for name in file.outputs if "_pool_out." not in name]
    return {name: torch.zeros_like(bound[name]) for name in results if bound[name].data_ptr() in inputs}


def _check_tensor(file: EngineFile, context: Any, name: str, tensor: torch.Tensor) -> None:
    """TensorRT sees addresses alone: what lies there has to be of the engine's dtype, shape and layout."""
    dtype = TORCH_NAMES.get(file.engine.get_tensor_dtype(name).name)
    shape = tuple(context.get_tensor_shape(name))
    if dtype != str(tensor.dtype).removeprefix("torch.") or shape != tuple(tensor.shape) or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise ConfigError(
            f"{file.path}: tensor {name} = {layout} {tensor.dtype} {list(tensor.shape)}: "
            f"the engine has contiguous {dtype} {list(shape)}"
        )
