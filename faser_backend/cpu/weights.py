"""The weight file of runtime "llvm", and the tables of offsets with which a segment's kernel reads it."""

from __future__ import annotations

import json
import logging
import mmap
import threading
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np

from faser_backend.core.model import ModelSpec
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import ModelEngine, SegmentSpec

# A call of such a small model ends before a second thread has woken up, and its weights stay in the caches.
ONE_THREAD_BYTES = 8 << 20
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_open_files: WeakValueDictionary[tuple[Path, int, int, int], WeightFile] = WeakValueDictionary()
_opening = threading.Lock()
_log = logging.getLogger(__name__)
_ATTENTION = ("q", "k", "v", "attention_out")
_MLP = ("gate", "up", "down")
_VECTORS = ("input_norm", "mlp_norm", "q_bias", "k_bias", "v_bias", "attention_out_bias", "gate_bias", "up_bias")
_VECTORS += ("down_bias", "q_norm", "k_norm", "hidden_norm")
_DTYPES = {"U8": np.uint8, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "I64": np.int64}


def open_weights(path: Path) -> WeightFile:
    """Opens a weight file, once for all runners of this process."""
    state = path.stat()
    with _opening:
        key = path.resolve(), state.st_ino, state.st_size, state.st_mtime_ns
        opened = _open_files.get(key)
        if opened is None:
            _open_files[key] = opened = WeightFile(path)
        return opened


class WeightFile:
    """A weight file in memory, mapped or copied: `data` [bytes] uint8, and the offsets of its tensors."""

    def __init__(self, path: Path) -> None:
        is_copied, reason = choose_copy(path.stat().st_size)
        _log.info("%s: %s", path.name, reason)
        self.data = _copy(path) if is_copied else np.memmap(path, np.uint8, "r").view(np.ndarray)
        num_header_bytes = int.from_bytes(self.data[:8].tobytes(), "little")
        self._entries = json.loads(self.data[8 : 8 + num_header_bytes].tobytes())
        self._start = 8 + num_header_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def offset(self, name: str) -> int:
        """Returns a tensor's offset in bytes from the beginning of the file."""
        return self._start + self._entries[name]["data_offsets"][0]

    def tensor(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        first, last = (self._start + at for at in entry["data_offsets"])
        return self.data[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def choose_copy(num_bytes: int) -> tuple[bool, str]:
    """Returns whether a weight file is copied into pages of 2 MiB, and the choice with its reason, for people.

    Large pages save look-ups of addresses, and a processor reads ahead to the end of a page. A mapped file has small
    ones. A copy takes at most half of the memory that is available.
    """
    if num_bytes <= ONE_THREAD_BYTES:
        return False, "mapped: small"
    if not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text():
        return False, f"mapped: this system has no large pages ({_HUGE_PAGES})"
    available = available_memory()
    if num_bytes > available // 2:
        return False, f"mapped: more than half of the {available >> 20} MiB that are available"
    return True, "copied into pages of 2 MiB"


def _copy(path: Path) -> np.ndarray:
    size = path.stat().st_size
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    with path.open("rb", buffering=0) as file:
        done = 0
        while count := file.readinto(data[done:].data):
            done += count
    if done < size:
        raise OSError(f"{path}: ends after {done} of {size} bytes")
    data.flags.writeable = False
    return data


def available_memory() -> int:
    """Returns the bytes that this process can allocate without swapping, within the limit of its control group."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit, used = (int((_CONTROL_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no control group, or "max"
        return available
    counts = (_CONTROL_GROUP / "memory.stat").read_text().splitlines()
    cached = next((int(line.split()[1]) for line in counts if line.startswith("inactive_file ")), 0)
    return min(available, limit - used + cached)


def cpu_quota() -> int | None:
    """Returns the whole cores that this process's control group may keep busy, at least 1, or None without a limit."""
    try:
        quota, period = (_CONTROL_GROUP / "cpu.max").read_text().split()
        return max(int(quota) // int(period), 1)
    except (OSError, ValueError):  # no control group, or "max"
        return None


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
            if (known := f"layers.{layer}.{name}") in weights:
                offsets[row, column] = end
                vectors.append(weights.tensor(known))
                end += vectors[-1].size
        if layer in feature_layers:
            offsets[row, -1] = feature_layers.index(layer)
    sizes = (segment.first_layer, segment.last_layer, spec.num_layers, spec.has_normalized_routing, spec.block_size > 0)
    return SegmentTables(segment, feature_layers, matrices, np.concatenate(vectors), offsets, np.array(sizes, np.int64))


def _matrix_names(spec: ModelSpec) -> tuple[str, ...]:
    """Returns the names of a layer's matrices, in the kernel's order."""
    if not spec.num_experts:
        return _ATTENTION + _MLP
    return (*_ATTENTION, "router", *(f"experts.{i}.{name}" for i in range(spec.num_experts) for name in _MLP))


def useful_threads(model: ModelEngine, partition: CorePartition) -> int:
    """Returns the number of threads that speed up calls of the model on this partition."""
    return 1 if model.num_weight_bytes <= ONE_THREAD_BYTES else partition.size
