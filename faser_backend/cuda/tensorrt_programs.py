"""`TensorRtPrograms`: the programs of runtimes "tensorrt" and "tensorrt_rtx", over segments that TensorRT compiled.

`EngineStore` deserialises each engine file once for all shares. Each call of the menu has a separate execution context
whose shapes and addresses are set once, because a captured graph is valid only while its context does not change.
Other calls share one. All contexts of a model share activation memory, because its calls are serial.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from faser_backend.core.errors import ConfigError
from faser_backend.cuda.buffers import ALIGNMENT, FEATURE_ROWS, FEATURES
from faser_backend.cuda.call_shapes import DIMENSIONS, UNLIMITED, CallBounds
from faser_backend.cuda.pool import pool_slots, write_kv
from faser_backend.cuda.segment import Launch, SegmentProgram
from faser_backend.manifest import BucketSpec, FileSpec, ModelEngine, SegmentSpec
from faser_backend.plugins.tensorrt_import import ErrorLog, TensorRt, import_tensorrt
from faser_backend.runtime_spec import RUNTIMES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProfileRange:
    """The range of shapes that optimisation profile `index` takes, by input name."""

    index: int
    smallest: Mapping[str, tuple[int, ...]]
    usual: Mapping[str, tuple[int, ...]]
    largest: Mapping[str, tuple[int, ...]]

    def refusals(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Returns a message for each input that does not fit."""
        found = []
        for name, low in self.smallest.items():
            shape, high = shapes[name], self.largest[name]
            fits = len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
            if not fits:
                found.append(f"{name} {list(shape)}: {list(low)} to {list(high)}")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class EngineFile:
    """A deserialised engine. `inputs` and `outputs`: names of its tensors, in order."""

    path: Path
    engine: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    profiles: tuple[ProfileRange, ...]

    @property
    def activation_bytes(self) -> int:
        """Returns the activation memory of one execution context, enough for all profiles."""
        return self.engine.device_memory_size_v2


class EngineStore:
    """The engines of one runtime of the manifest, by file, and the cache of kernels compiled for the GPU."""

    def __init__(self, runtime: str) -> None:
        """Raises TensorRtError if the runtime's TensorRT is not installed."""
        self.tensorrt: TensorRt = import_tensorrt(RUNTIMES[runtime].tensorrt)
        self.log = ErrorLog(self.tensorrt)
        self._runtime = self.tensorrt.module.Runtime(self.log.logger)
        self._files: dict[Path, EngineFile] = {}
        self._caches: dict[Path, Any] = {}  # RTX only, like the next
        self._configs: dict[tuple[Path, bool], Any] = {}  # by file and whether contexts are captured
        self._memories: dict[tuple[Path, ...], torch.Tensor] = {}
        self._lock = Lock()  # two lanes may open at once

    def open(self, path: Path) -> EngineFile:
        """Opens the engine of a file. Raises ConfigError with the file and the reason."""
        with self._lock:
            if path not in self._files:
                engine = self._deserialize(path)
                inputs, outputs = _tensor_names(self.tensorrt.module, engine)
                self._files[path] = EngineFile(path, engine, inputs, outputs, _profile_ranges(engine, inputs))
            return self._files[path]

    def activation_memory(self, files: Sequence[EngineFile], device: torch.device) -> torch.Tensor:
        """Returns the activation memory of a model's segments, uint8, which runners on all shares use.

        Calls of a model are ordered across shares, as for its KV pool.
        """
        key = tuple(file.path for file in files)
        with self._lock:
            if key not in self._memories:
                num_bytes = max(ALIGNMENT, *(file.activation_bytes for file in files))
                self._memories[key] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return self._memories[key]

    def new_context(self, file: EngineFile, *, is_captured: bool) -> Any:
        """Creates an execution context without memory: call set_device_memory first.

        is_captured: its calls are captured into CUDA graphs.
        """
        module, engine = self.tensorrt.module, file.engine
        strategy = module.ExecutionContextAllocationStrategy.USER_MANAGED
        with self._lock:
            if self.tensorrt.has_runtime_cache:
                key = (file.path, is_captured)
                if key not in self._configs:
                    self._configs[key] = self._rtx_config(file, strategy, is_captured)
                context = engine.create_execution_context(self._configs[key])
            else:
                context = engine.create_execution_context(strategy)
        if context is None:
            raise ConfigError(str(self.log.fail(f"{file.path}: execution context", "TensorRT made none")))
        self.log.check(f"{file.path}: execution context")
        return context

    def close(self) -> None:
        """Stores the kernels compiled for this GPU beside the engines, for the next start, and frees the engines.

        All contexts must have been freed before.
        """
        for path, cache in self._caches.items():
            partial = path.with_name(path.name + ".partial")
            try:
                partial.write_bytes(memoryview(cache.serialize()))
                os.replace(partial, path)
            except OSError as error:  # an engine directory may be read-only, or its disk full
                with suppress(OSError):
                    partial.unlink(missing_ok=True)
                logger.warning("%s: compiled kernels cannot be stored (%s); each start recompiles them", path, error)
        self._configs.clear()
        self._caches.clear()
        self._files.clear()
        self._memories.clear()

    def _deserialize(self, path: Path) -> Any:
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                engine = self._runtime.deserialize_cuda_engine(content)
                errors = self.log.take_errors()
                if engine is None:
                    detail = errors[0] if errors else "no reason given"
                    raise ConfigError(f"{path}: {self._reason(content, errors)} ({self.tensorrt.title}: {detail})")
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ConfigError(f"{path}: cannot be read as an engine ({error})") from None
        if errors:
            raise ConfigError(f"{path}: {errors[0]}")
        return engine

    def _reason(self, content: Any, errors: list[str]) -> str:
        """Returns the reason why TensorRT refused an engine, if it reports one."""
        if self.tensorrt.has_engine_validity:
            diagnostics = int(self._runtime.get_engine_validity(content)[1])
            self.log.take_errors()
            members = self.tensorrt.module.EngineInvalidityDiagnostics.__members__.items()
            if names := [name for name, bit in members if diagnostics & int(bit)]:
                advice = "build it again with this TensorRT for this GPU"
                if "UNSUPPORTED_CC" in names:
                    advice = "this TensorRT may not know this GPU: faser build --runtime torch"
                return f"is refused ({', '.join(names)}); {advice}"
        if any("cudaError" in error for error in errors):
            return "cannot be loaded: there is no GPU here, or no CUDA driver that works"
        is_damaged = any("Serialization" in error for error in errors)
        return "is damaged, or no engine of this flavour of TensorRT; build it again" if is_damaged else "is refused"

    def _rtx_config(self, file: EngineFile, strategy: Any, is_captured: bool) -> Any:
        """Returns a configuration of RTX, with its own graphs off.

        RTX can compile kernels for each new shape. Contexts that are captured wait for that, before the first request.
        The others never do: they run kernels for any shape.
        """
        module = self.tensorrt.module
        config = file.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        config.cuda_graph_strategy = module.CudaGraphStrategy.DISABLED
        strategies = module.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER if is_captured else strategies.NONE
        config.set_runtime_cache(self._cache(config, cache_path(file.path)))
        self.log.check(f"{file.path}: runtime configuration")
        return config

    def _cache(self, config: Any, path: Path) -> Any:
        if path not in self._caches:
            cache = config.create_runtime_cache()
            if path.exists() and not cache.deserialize(path.read_bytes()):
                self.log.take_errors()
                logger.warning("%s: made for another GPU, driver or version; kernels are compiled again", path)
            self._caches[path] = cache
        return self._caches[path]


def cache_path(engine_path: Path) -> Path:
    """Returns the file that stores kernels which RTX compiled for this GPU."""
    return engine_path.with_name(engine_path.name + ".kernels")


def _tensor_names(module: Any, engine: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == module.TensorIOMode.INPUT]
    return tuple(inputs), tuple(name for name in names if name not in inputs)


def _profile_ranges(engine: Any, inputs: tuple[str, ...]) -> tuple[ProfileRange, ...]:
    profiles = []
    for index in range(engine.num_optimization_profiles):
        ranges = {name: engine.get_tensor_profile_shape(name, index) for name in inputs}
        profiles.append(ProfileRange(index, *({name: tuple(ranges[name][end]) for name in inputs} for end in range(3))))
    return tuple(profiles)


TORCH_NAMES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64"}


class TensorRtPrograms:
    """Opens compiled segments; a segment.ProgramSource."""

    def __init__(self, engine_dir: Path, runtime: str, device: torch.device, compiler: str) -> None:
        """compiler: the manifest's. Raises TensorRtError if TensorRT is missing or did not build the engines."""
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

    def activation_bytes(self, models: Sequence[ModelEngine]) -> int:
        """See ProgramSource. Their weights are then loaded."""
        self._opened.update(model.files for model in models)
        paths = [[self._engine_dir / segment.file.name for segment in model.segments] for model in models]
        return sum(max(self._store.open(path).activation_bytes for path in each) for each in paths)

    def num_unloaded_bytes(self, models: Sequence[ModelEngine]) -> int:
        return sum(model.num_weight_bytes for model in models if model.files not in self._opened)

    def close(self) -> None:
        self._store.close()
        self._opened.clear()


def profiles_of_split(buckets: Sequence[BucketSpec], split: str) -> list[int] | None:
    """Returns the profiles for a share: its split's, else those of no split; None, for any, without buckets."""
    own = [index for index, bucket in enumerate(buckets) if bucket.split == split]
    return (own or [index for index, bucket in enumerate(buckets) if not bucket.split]) if buckets else None


def bucket_limits(segments: Sequence[SegmentSpec], split: str) -> CallBounds | None:
    """Returns the largest call that all segments have profiles for, by dimension; None without buckets."""
    if not all(segment.buckets for segment in segments):
        return None
    limits = dict(zip((*DIMENSIONS, "has_adapters"), UNLIMITED, strict=True))
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
    """Opens a model's segments for a share. profiles: the share's, by index; None = all. Raises ConfigError."""
    files = [store.open(engine_dir / segment.file.name) for segment in model.segments]
    memory = store.activation_memory(files, device)
    names = (tensor.name for segment in model.segments for tensor in (*segment.inputs, *segment.outputs))
    features = tuple(name for name in names if name.startswith(f"{FEATURE_ROWS}."))  # in the order of the pool's
    return [
        TensorRtSegment(segment, store, file, memory, profiles, features=features)
        for segment, file in zip(model.segments, files, strict=True)
    ]


def current_stream() -> int:
    """Returns the handle of the calling thread's CUDA stream."""
    return torch.cuda.current_stream().cuda_stream


@dataclass(eq=False)
class TensorRtSegment:
    """A SegmentProgram that TensorRT compiled."""

    spec: SegmentSpec
    store: EngineStore
    file: EngineFile
    memory: torch.Tensor  # uint8, for activations; programs that share it never run concurrently
    profiles: Sequence[int] | None = None  # indices of the share's; None = all
    _: KW_ONLY
    features: Sequence[str] = ()  # tensor names of the pool's features, in order
    packs_tables = False  # a network reads tables of the call's width

    def __post_init__(self) -> None:
        own = [each for each in self.file.profiles if self.profiles is not None and each.index in self.profiles]
        self._profiles = own or self.file.profiles
        self._writes_pool = not any(tensor.name.startswith("k_new.") for tensor in self.spec.outputs)
        self._shared_context = self._new_context(is_captured=False)  # of calls that are not kept

    def prepare(self, tensors: Mapping[str, torch.Tensor], bounds: CallBounds, *, is_kept: bool = True) -> Launch:
        """See SegmentProgram. Setting the profile is queued on the current stream."""
        bound = _bound_tensors(self.file, tensors)
        apart = _apart(self.file, bound)
        bound |= apart
        shapes = {name: tuple(bound[name].shape) for name in self.file.inputs}
        profile = choose_profile(self._profiles, shapes, str(self.file.path))
        context = self._new_context(is_captured=True) if is_kept else self._shared_context
        self._check(context.set_optimization_profile_async(profile.index, current_stream()), f"profile {profile.index}")
        for name, shape in shapes.items():
            self._check(context.set_input_shape(name, shape), f"{name} {list(shape)}")
        if missing := context.infer_shapes():
            raise ConfigError(f"{self.file.path}: shapes of {', '.join(missing)} do not follow from the inputs")
        for name, tensor in bound.items():
            _check_tensor(self.file, context, name, tensor)
            # an empty tensor has no memory, and TensorRT wants an address
            address = tensor.data_ptr() if tensor.numel() else self.memory.data_ptr()
            self._check(context.set_tensor_address(name, address), f"address of {name}")
        self.store.log.check(f"{self.file.path}: prepare")
        return self._launch(context, dict(tensors), apart)

    def _new_context(self, *, is_captured: bool) -> Any:
        context = self.store.new_context(self.file, is_captured=is_captured)
        context.set_device_memory(self.memory.data_ptr(), self.memory.numel())
        return context

    def _check(self, was_taken: bool, what: str) -> None:
        if not was_taken:
            raise self.store.log.fail(f"{self.file.path}: {what}", "TensorRT refused it")

    def _launch(self, context: Any, tensors: dict[str, torch.Tensor], apart: dict[str, torch.Tensor]) -> Launch:
        """apart: outputs that are copied to their tensors afterwards."""
        layers = () if self._writes_pool else range(self.spec.first_layer, self.spec.last_layer)
        read, written = (self._kept_features(names, tensors) for names in (self.file.inputs, self.file.outputs))

        def launch() -> None:
            if read:
                slots = pool_slots(tensors["slot_mapping"], tensors[FEATURES])
                for name, kept in read.items():
                    torch.index_select(kept, 0, slots, out=tensors[name])
            if not context.execute_async_v3(current_stream()):
                raise self.store.log.fail(f"{self.file.path}: execute", "TensorRT refused the call")
            for layer in layers:
                k_new, v_new, k_pool, v_pool = (
                    tensors[f"{name}.{layer}"] for name in ("k_new", "v_new", "k_pool", "v_pool")
                )
                write_kv(k_new, v_new, tensors["slot_mapping"], k_pool, v_pool)
            if written:
                slots = pool_slots(tensors["slot_mapping"], tensors[FEATURES])
                for name, kept in written.items():
                    kept.index_copy_(0, slots, tensors[name])
            for name, made in apart.items():
                tensors[name].copy_(made)

        return launch

    def _kept_features(self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns views of the pool's features by tensor name, [KV positions of the pool, hidden_size]."""
        wanted = [name for name in names if name in self.features]
        return {name: tensors[FEATURES].flatten(0, 1)[:, self.features.index(name)] for name in wanted}


def choose_profile(
    profiles: Sequence[ProfileRange], shapes: Mapping[str, tuple[int, ...]], engine: str
) -> ProfileRange:
    """Returns the profile that takes the shapes and is tuned for the nearest number of rows; of equals the first.

    shapes: of every input, by name; the first has a row per token. Raises ConfigError with the inputs that the closest
    profile refuses.
    """
    first, (num_rows, *_) = next(iter(shapes.items()))
    fitting = [profile for profile in profiles if not profile.refusals(shapes)]
    if fitting:
        return min(fitting, key=lambda profile: abs(math.log(num_rows / profile.usual[first][0])))
    closest = min((profile.refusals(shapes) for profile in profiles), key=len)
    raise ConfigError(f"{engine}: no profile takes a call with {'; '.join(closest)}; build for larger calls")


def _bound_tensors(file: EngineFile, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns every tensor of the engine by name. A pool written in place is bound as input and output."""
    bound = {}
    for name in (*file.inputs, *file.outputs):
        source = name.replace("_pool_out.", "_pool.")
        if source not in tensors:
            raise ConfigError(f"{file.path}: tensor {name}: the runner does not provide it; build the engine again")
        bound[name] = tensors[source]
    return bound


def _apart(file: EngineFile, bound: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns separate tensors for outputs that share an input's memory, except pools.

    An engine may write an output before it has read the input. A draft head's output is its next call's input.
    """
    inputs = {bound[name].data_ptr() for name in file.inputs if bound[name].numel()}
    results = [name for name in file.outputs if "_pool_out." not in name]
    return {name: torch.zeros_like(bound[name]) for name in results if bound[name].data_ptr() in inputs}


def _check_tensor(file: EngineFile, context: Any, name: str, tensor: torch.Tensor) -> None:
    """Checks dtype, shape and layout, because TensorRT gets only addresses. Raises ConfigError."""
    dtype = TORCH_NAMES.get(file.engine.get_tensor_dtype(name).name)
    shape = tuple(context.get_tensor_shape(name))
    if dtype != str(tensor.dtype).removeprefix("torch.") or shape != tuple(tensor.shape) or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise ConfigError(
            f"{file.path}: tensor {name} = {layout} {tensor.dtype} {list(tensor.shape)}: "
            f"the engine has contiguous {dtype} {list(shape)}"
        )
