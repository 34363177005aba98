"""Engine files of TensorRT and TensorRT-RTX, loaded once each and shared by all shares of the device.

`EngineStore` deserialises, refuses with one clear error, and makes execution contexts that work in memory of
the caller's: a context is cheap, its activations are not. Knows nothing of segments or KV pools.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from faser_backend.core.errors import ConfigError
from faser_backend.plugins.tensorrt_import import ErrorLog, TensorRt, import_tensorrt
from faser_backend.runtime_spec import RUNTIMES

logger = logging.getLogger(__name__)

ALIGNMENT = 256  # of the memory that TensorRT works in
# What `get_engine_validity` says of a file, in the order in which it is worth saying.
DIAGNOSTICS = {
    "MALFORMED_ENGINE": "is damaged, or no engine of this flavour of TensorRT; build it again",
    "VERSION_MISMATCH": "was built by another version of TensorRT; build it again",
    "UNSUPPORTED_CC": "was not built for this GPU's compute capability; build it again with that capability",
    "OLD_CUDA_DRIVER": "needs a newer CUDA driver",
    "OLD_CUDA_RUNTIME": "needs a newer CUDA runtime",
    "INSUFFICIENT_GPU_MEMORY": "does not fit into the GPU's free memory",
    "CUDA_ERROR": "cannot be checked: the CUDA driver or runtime does not work here",
}
NO_DEVICE = "cannot be loaded: there is no GPU here, or no CUDA driver that works"


@dataclass(frozen=True, slots=True)
class ProfileRange:
    """The shapes that optimisation profile `index` takes, by input name: it is fastest near those it was tuned for."""

    index: int
    smallest: Mapping[str, tuple[int, ...]]
    largest: Mapping[str, tuple[int, ...]]

    def refusals(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Why a call does not fit, input by input; empty where it fits."""
        found = []
        for name, low in self.smallest.items():
            shape, high = shapes[name], self.largest[name]
            fits = len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
            if not fits:
                found.append(f"{name} {list(shape)}: {list(low)} to {list(high)}")
        return found

    @property
    def size(self) -> int:
        """Elements of all inputs at their largest; pools, which no profile narrows, count alike everywhere."""
        return sum(math.prod(shape) for shape in self.largest.values())


@dataclass(frozen=True, slots=True, eq=False)
class EngineFile:
    """A deserialised engine. `inputs` and `outputs`: names of its tensors, in its order."""

    path: Path
    engine: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    profiles: tuple[ProfileRange, ...]

    @property
    def activation_bytes(self) -> int:
        """Memory that one execution context works in, whatever its profile."""
        return self.engine.device_memory_size_v2


class EngineStore:
    """The engines of one runtime of the manifest, each file once, and the cache of what was compiled for the GPU."""

    def __init__(self, runtime: str) -> None:
        """Raises TensorRtError where the runtime's TensorRT is not installed."""
        self.tensorrt: TensorRt = import_tensorrt(RUNTIMES[runtime].tensorrt)
        self.log: ErrorLog = self.tensorrt.error_log()
        self._runtime = self.tensorrt.module.Runtime(self.log.logger)
        self._files: dict[Path, EngineFile] = {}
        self._caches: dict[Path, Any] = {}  # RTX alone, as the next
        self._configs: dict[tuple[Path, bool], Any] = {}  # of contexts that are captured, or not
        self._memories: dict[tuple[Path, ...], torch.Tensor] = {}
        self._lock = Lock()  # two lanes may open at once

    def open(self, path: Path) -> EngineFile:
        """The engine of a file. Raises ConfigError naming the file and the reason."""
        with self._lock:
            if path not in self._files:
                engine = self._deserialize(path)
                inputs, outputs = _tensor_names(self.tensorrt.module, engine)
                self._files[path] = EngineFile(path, engine, inputs, outputs, _profile_ranges(engine, inputs))
            return self._files[path]

    def activation_memory(self, files: Sequence[EngineFile], device: torch.device) -> torch.Tensor:
        """Memory that the segments of a model work in, uint8. All shares that the model runs on have the same: they
        never run it at once, and are ordered with each other, as they are for its KV pool."""
        key = tuple(file.path for file in files)
        with self._lock:
            if key not in self._memories:
                num_bytes = max(ALIGNMENT, *(file.activation_bytes for file in files))
                self._memories[key] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return self._memories[key]

    def new_context(self, file: EngineFile, *, is_captured: bool) -> Any:
        """An execution context without memory of its own: its user calls set_device_memory before anything else.

        is_captured: its calls go into CUDA graphs.
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
        """Keeps what was compiled for this GPU beside the engines, so that the next start need not compile it; frees
        the engines. Contexts must have gone before."""
        for path, cache in self._caches.items():
            partial = path.with_name(path.name + ".partial")
            try:
                partial.write_bytes(memoryview(cache.serialize()))
                os.replace(partial, path)
            except OSError as error:  # an engine directory may be read-only
                logger.warning("%s: compiled kernels cannot be kept (%s); each start compiles them again", path, error)

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
        """Why an engine was refused, in words, as far as TensorRT tells."""
        if self.tensorrt.has_engine_validity:
            diagnostics = int(self._runtime.get_engine_validity(content)[1])
            self.log.take_errors()
            members = self.tensorrt.module.EngineInvalidityDiagnostics.__members__
            for name, text in DIAGNOSTICS.items():
                if name in members and diagnostics & int(members[name]):
                    return text
        if any("cudaError" in error for error in errors):
            return NO_DEVICE
        return DIAGNOSTICS["MALFORMED_ENGINE"] if any("Serialization" in error for error in errors) else "is refused"

    def _rtx_config(self, file: EngineFile, strategy: Any, is_captured: bool) -> Any:
        """RTX compiles kernels when a context first meets a shape, in the background and with slow kernels until
        then. A captured graph would keep those for good, so its context waits. RTX's own graphs are off."""
        module = self.tensorrt.module
        config = file.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        config.cuda_graph_strategy = module.CudaGraphStrategy.DISABLED
        strategies = module.DynamicShapesKernelSpecializationStrategy
        specialization = strategies.EAGER if is_captured else strategies.LAZY
        config.dynamic_shapes_kernel_specialization_strategy = specialization
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
    """Where the kernels that RTX compiled for the GPU at hand are kept."""
    return engine_path.with_name(engine_path.name + ".kernels")


def _tensor_names(module: Any, engine: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == module.TensorIOMode.INPUT]
    return tuple(inputs), tuple(name for name in names if name not in inputs)


def _profile_ranges(engine: Any, inputs: tuple[str, ...]) -> tuple[ProfileRange, ...]:
    profiles = []
    for index in range(engine.num_optimization_profiles):
        ranges = {name: engine.get_tensor_profile_shape(name, index) for name in inputs}
        smallest, largest = ({name: tuple(shapes[end]) for name, shapes in ranges.items()} for end in (0, 2))
        profiles.append(ProfileRange(index, smallest, largest))
    return tuple(profiles)
