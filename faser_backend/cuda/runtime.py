"""`CudaRuntime`: the GPU runtimes, torch and TensorRT; implements device.runtime.Runtime.

They differ only in the source of programs. The stepping thread queues on the stream of the whole device, lanes on the
streams of their shares; StreamLanes explains why that orders every use of a pool. While a split runs, the stepping
thread waits, so the whole device runs nothing else.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import ModelSpec
from faser_backend.core.ports import Behind, DraftLoop, GraphCounts, Sampler
from faser_backend.cuda.draft_loop import TorchDraftLoop
from faser_backend.cuda.graphs import GraphCapturer, is_fatal
from faser_backend.cuda.green_contexts import load_driver
from faser_backend.cuda.memory_plan import ELEMENT_BYTES, block_bytes, plan_memory
from faser_backend.cuda.pool import CudaKvPool
from faser_backend.cuda.runner import CudaAdaptableRunner, CudaBlockRunner, CudaHeadRunner, CudaRunner
from faser_backend.cuda.sampler import TorchSampler
from faser_backend.cuda.segment import ProgramSource
from faser_backend.cuda.streams import SmMenu, SmPartition, StreamLanes, open_menu
from faser_backend.cuda.tensorrt_programs import TensorRtPrograms
from faser_backend.cuda.torch_programs import TorchPrograms
from faser_backend.device.partition import CorePartition, PartitionMenu, ThreadLanes, core_partitions, split_name
from faser_backend.device.runtime import DRAFTS_IN_TURN, NO_DRAFT, ModelPair, OpenLanes, OpenRunner
from faser_backend.manifest import EngineManifest, ModelEngine

_log = logging.getLogger(__name__)
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues: with too few, streams wait for each other
NUM_CONNECTIONS = "32"  # the maximum
CPU_MEMORY_SHARE = 0.25
# The least SMs of a share without a profile. Fewer have a small part of the memory bandwidth, so even a small draft
# would take longer on them than the target takes to verify.
MIN_GUESSED_SMS = 16
USUAL_DRAFT_TOKENS = 4  # assumed per overlapped step when ordering splits without a profile
Share = SmPartition | CorePartition


@dataclass(eq=False)
class CudaRuntime:
    """Runs a pair of models on one GPU, or, for tests, on torch's CPU device. Owns green contexts and programs."""

    device: torch.device
    programs: ProgramSource
    models: ModelPair
    kv_block_size: int
    _: KW_ONLY
    dtype: str  # the manifest's
    shares: SmMenu | None  # the GPU's, closed with the runtime; None on torch's CPU device
    make_capturer: Callable[[GraphCounts], GraphCapturer] | None = None  # of a runner's graphs; None = no graphs

    def __post_init__(self) -> None:
        models, shares = self.models, self.shares
        self.graph_counts = GraphCounts()
        self.behind: Behind | None = deque()
        self.menu: PartitionMenu[Any] = core_partitions() if shares is None else shares.menu
        splits, self.splits_note = self.menu.splits, self.menu.note
        if models.draft is None:
            splits, self.splits_note = (), NO_DRAFT
        elif models.draft.spec.reads_target:
            splits, self.splits_note = (), DRAFTS_IN_TURN
        elif shares is not None:
            all_splits, splits = splits, [s for s in splits if _has_profiles(models, split_name(*s))]
            if len(splits) < len(all_splits):
                found = ", ".join(split_name(*split) for split in splits) or "none, so every step is serial"
                self.splits_note = f"{found} (the engines have no profiles for others: faser build --splits)"
                _log.warning("SM splits: %s", self.splits_note)
        if models.draft is not None:
            splits = best_first(splits, models.draft.num_weight_bytes, models.target.num_weight_bytes)
        self.splits = tuple(splits)
        self.needs_warm_up = shares is not None

    def free_bytes(self) -> int:
        """Returns the free memory of the driver and of torch's cache, less unloaded weights."""
        gc.collect()  # reference cycles keep the pools of an engine that was closed
        unloaded = self.programs.num_unloaded_bytes(self.models.present)
        if self.shares is None:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - unloaded
        cuda = self.menu.whole.cuda
        cuda.empty_cache()  # destroyed graphs' memory, which is kept for graphs
        cached = cuda.memory_reserved(self.device) - cuda.memory_allocated(self.device)
        return cuda.mem_get_info(self.device)[0] + cached - unloaded

    def kv_bytes(self, num_partitions: int, config: EngineConfig) -> int:
        """See Runtime. On a GPU it logs the memory plan."""
        if self.shares is None:
            return int(self.free_bytes() * CPU_MEMORY_SHARE)
        compiled_bytes = self.programs.activation_bytes(self.models.present)  # loads compiled engines
        plan = plan_memory(
            self.models.present, config, dtype=self.dtype, num_partitions=num_partitions, unloaded_bytes=0,
            kv_block_size=self.kv_block_size, free_bytes=self.free_bytes(), compiled_bytes=compiled_bytes,
        )  # fmt: skip
        for line in plan.report(self.kv_block_size):
            _log.info("memory: %s", line)
        return plan.kv_bytes

    def bytes_per_block(self, spec: ModelSpec) -> int:
        return block_bytes(spec, self.kv_block_size, ELEMENT_BYTES[self.dtype])

    def bind_step_thread(self) -> None:
        """See Runtime. Does nothing on a CPU, where calls are synchronous."""
        if self.shares is not None:
            self.menu.whole.bind_current_thread()

    def open_pool(self, model: ModelEngine, num_blocks: int) -> CudaKvPool:
        return CudaKvPool(model.spec, num_blocks, self.kv_block_size, dtype=self.dtype, device=self.device)

    def fill_pool(self, pool: CudaKvPool, numbers: np.ndarray) -> None:
        pool.storage.copy_(torch.from_numpy(numbers).to(pool.storage))  # expands on the device, not on the host

    def open_runner(self, model: ModelEngine, share: Share, pool: CudaKvPool) -> OpenRunner:
        split = next((split_name(*pair) for pair in self.menu.splits if share in pair), "")  # "": the whole device
        programs = self.programs.open(model, split, share.size)
        capturer = None if self.make_capturer is None else self.make_capturer(self.graph_counts)
        limits = self.programs.limits(model, split)
        decoder = CudaAdaptableRunner if isinstance(self.programs, TorchPrograms) else CudaRunner
        kind = CudaBlockRunner if model.spec.block_size else CudaHeadRunner if model.spec.reads_target else decoder
        own = share if isinstance(share, SmPartition) else None
        return kind(model, programs, pool, self.device, limits=limits, capturer=capturer, share=own)

    def open_lanes(self, draft: Share, target: Share) -> OpenLanes:
        if isinstance(draft, SmPartition) and isinstance(target, SmPartition):
            return StreamLanes(draft, target)
        return ThreadLanes(draft, target)

    def open_sampler(self, vocab_size: int, max_num_seqs: int) -> TorchSampler:
        return TorchSampler(vocab_size, max_num_seqs, self.device, self.behind)

    def open_draft_loop(self, runner: OpenRunner, sampler: Sampler) -> DraftLoop | None:
        assert isinstance(sampler, TorchSampler) and isinstance(runner, CudaRunner)
        return None if runner.block_size else TorchDraftLoop(runner, sampler)

    def is_fatal(self, error: BaseException) -> bool:
        return is_fatal(error)

    def synchronize(self) -> None:
        if self.shares is not None:
            self.menu.whole.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Waits for the device. May be called again."""
        if self.shares is not None:
            self.menu.whole.cuda.synchronize(self.device)
        self.programs.close()
        if self.shares is not None:
            self.shares.close()


def _has_profiles(models: ModelPair, split: str) -> bool:
    """Tells whether every model can run on a split. TensorRT may crash on a green context without a profile."""
    buckets = [model.segments[0].buckets for model in models.present]
    return all(not each or split in {bucket.split for bucket in each} for each in buckets)


def best_first(splits: Iterable[tuple[Share, Share]], draft_bytes: int, target_bytes: int) -> list[tuple[Share, Share]]:
    """Sorts splits by how near the draft's share of SMs is to its share of the bytes that an overlapped step reads.

    With few rows both models are bound by reading weights. Shares that are too small without a profile are last.
    """
    read_bytes = USUAL_DRAFT_TOKENS * draft_bytes
    share_of_bytes = read_bytes / max(read_bytes + target_bytes, 1)

    def rank(split: tuple[Share, Share]) -> tuple[bool, float]:
        draft, target = split
        is_small = isinstance(draft, SmPartition) and min(draft.size, target.size) < MIN_GUESSED_SMS
        return is_small, abs(draft.size / (draft.size + target.size) - share_of_bytes)

    return sorted(splits, key=rank)


def open_cuda_runtime(engine_dir: Path, manifest: EngineManifest) -> CudaRuntime:
    """Opens the GPU runtime of an engine directory. Raises ConfigError or FaserError if it cannot run here."""
    has_gpu = prepare_cuda()
    if manifest.runtime_spec.tensorrt and not has_gpu:
        raise ConfigError(
            f"runtime = {manifest.runtime!r}: torch {torch.__version__} sees no CUDA device here; "
            "`faser doctor` tells what is missing"
        )
    device = current_device()
    if manifest.runtime_spec.tensorrt is None:
        programs: ProgramSource = TorchPrograms.of_directory(engine_dir, manifest.dtype, device, manifest.target)
    else:
        programs = TensorRtPrograms(engine_dir, manifest.runtime, device, manifest.compiler)
    models = ModelPair(manifest.target, manifest.draft)
    return open_on_device(programs, models, manifest.kv_block_size, dtype=manifest.dtype)


def open_on_device(programs: ProgramSource, models: ModelPair, kv_block_size: int, *, dtype: str) -> CudaRuntime:
    """Opens a runtime for models of any origin on the current GPU, or on torch's CPU device without one."""
    device = current_device()
    shares = open_menu(torch.cuda, device.index, load_driver) if prepare_cuda() else None
    make_capturer = None if shares is None else GraphCapturer
    if shares is None:
        _log.warning("runtime torch: no CUDA device; computing on the CPU, which is for tests only")
    return CudaRuntime(device, programs, models, kv_block_size, dtype=dtype, shares=shares, make_capturer=make_capturer)


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def prepare_cuda() -> bool:
    """Opens torch's CUDA context with the most hardware queues; returns False without a GPU."""
    if not torch.cuda.is_initialized():
        os.environ.setdefault(MAX_CONNECTIONS, NUM_CONNECTIONS)  # before anything opens the driver
    if not torch.cuda.is_available():
        return False
    found = os.environ.get(MAX_CONNECTIONS, "unset")
    if found != NUM_CONNECTIONS:
        _log.warning(
            "%s = %s: %s, set before CUDA starts, lets streams overlap", MAX_CONNECTIONS, found, NUM_CONNECTIONS
        )
    torch.cuda.init()
    return True
