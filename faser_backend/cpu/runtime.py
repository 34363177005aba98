"""The runtime of a CPU, on the cores of this machine: kernels of ours; implements device.runtime.Runtime."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from faser_backend.core.config import EngineConfig
from faser_backend.core.graph_counts import GraphCounts
from faser_backend.core.model import ModelSpec
from faser_backend.core.ports import DraftLoop, Sampler
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.cpu.weights import useful_threads
from faser_backend.device.lanes import ThreadLanes
from faser_backend.device.partition import CorePartition, PartitionMenu, core_partitions, split_name
from faser_backend.device.runtime import DRAFTS_IN_TURN, NO_DRAFT, ModelPair, OpenRunner
from faser_backend.manifest import EngineManifest, ModelEngine

KV_MEMORY_SHARE = 0.25  # of free memory

Split = tuple[CorePartition, CorePartition]  # (draft, target)


class LlvmRuntime:
    """Runs the pair of one engine directory. Holds nothing itself: runners, lanes and pools are the caller's, and all
    runners of a model read one mapped file."""

    def __init__(
        self,
        engine_dir: Path,
        models: ModelPair,
        kv_block_size: int,
        *,
        kv_cache_dtype: str = "fp32",
        num_threads: int | None = None,
        menu: PartitionMenu[CorePartition] | None = None,
    ) -> None:
        """kv_cache_dtype: of kv_pool.DTYPES. num_threads: as of LlvmRunner. menu: the cores to use, by default all of
        this process."""
        # Numpy's threads stay awake for tens of milliseconds after a product of matrices, as policies make them, and
        # take the cores from the calls that come next: with them calls took a quarter longer.
        threadpool_limits(1, user_api="blas")
        self.kv_block_size = kv_block_size
        self.menu = menu or core_partitions()
        self.needs_warm_up = False
        self.graph_counts = GraphCounts()
        self._engine_dir, self._models = engine_dir, models
        self._kv_cache_dtype, self._num_threads = kv_cache_dtype, num_threads
        splits, self.splits_note = useful_splits(self.menu, models, num_threads)
        self.splits = tuple(splits)

    def free_bytes(self) -> int:
        """Weights are not counted: they are small beside what a share of free memory leaves."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def kv_bytes(self, num_partitions: int, config: EngineConfig) -> int:
        """A share of free memory; no weight of it is spent on calls."""
        return int(self.free_bytes() * KV_MEMORY_SHARE)

    def bytes_per_block(self, spec: ModelSpec) -> int:
        return KvPool.bytes_per_block(spec, self.kv_block_size, self._kv_cache_dtype)

    def bind_step_thread(self) -> None:
        """Calls run where they are made, and end before they return."""

    def open_pool(self, model: ModelEngine, num_blocks: int) -> KvPool:
        return KvPool(model.spec, num_blocks, self.kv_block_size, dtype=self._kv_cache_dtype)

    def fill_pool(self, pool: KvPool, numbers: np.ndarray) -> None:
        """Pages that were never written would all be one page in the cache."""
        pool.storage[:] = numbers

    def open_runner(self, model: ModelEngine, share: CorePartition, pool: KvPool) -> OpenRunner:
        # Not above: it loads numba, which other runtimes do not need.
        from faser_backend.cpu.runner import LlvmHeadRunner, LlvmRunner

        arguments = (model, self._engine_dir, share, pool)
        if model.spec.reads_target:
            return LlvmHeadRunner(*arguments, self._models.target, num_threads=self._num_threads)
        return LlvmRunner(*arguments, num_threads=self._num_threads)

    def open_lanes(self, draft: CorePartition, target: CorePartition) -> ThreadLanes:
        return ThreadLanes(draft, target)

    def open_sampler(self, vocab_size: int, max_num_seqs: int) -> NumpySampler:
        return NumpySampler(vocab_size, max_num_seqs)

    def open_draft_loop(self, runner: OpenRunner, sampler: Sampler) -> DraftLoop | None:
        """The host sees the logits without asking anyone, so it picks the tokens itself."""

    def is_fatal(self, error: BaseException) -> bool:
        """A CPU goes on computing."""
        return False

    def synchronize(self) -> None:
        """Calls end before they return."""

    def close(self) -> None:
        """Nothing is held."""


def open_llvm(engine_dir: Path, manifest: EngineManifest, config: EngineConfig) -> LlvmRuntime:
    """Opens this machine's cores for an engine directory."""
    return LlvmRuntime(
        engine_dir,
        ModelPair(manifest.target, manifest.draft),
        manifest.kv_block_size,
        kv_cache_dtype=manifest.kv_cache_dtype,
        num_threads=config.num_threads,
    )


def useful_splits(
    menu: PartitionMenu[CorePartition], models: ModelPair, num_threads: int | None
) -> tuple[list[Split], str]:
    """The splits of the menu on which both models use all their cores, and in words how many of how many and why."""
    num_cores, draft = menu.whole.size, models.draft
    if draft is None:
        return [], NO_DRAFT
    if draft.spec.reads_target:
        return [], DRAFTS_IN_TURN
    if not menu.can_split:
        return [], f"none ({menu.note})"
    if num_threads is not None and num_threads < num_cores:
        return [], f"none (num_threads = {num_threads} of {num_cores} cores: a split uses them all)"
    splits = [split for split in menu.splits if useful_threads(draft, split[0]) == split[0].size]
    reason = f"{len(splits)} of {len(menu.splits)}"
    if splits:
        reason += f" ({', '.join(split_name(*split) for split in splits)})"
    if len(splits) < len(menu.splits):
        reason += f"; the draft cannot use more than {splits[-1][0].size} core(s)"
    return splits, reason


def cpu_identity() -> dict[str, str | int]:
    """The facts that decide how long calls take here, by name: processor, cores in use, who compiles and computes."""
    from faser_backend.cpu.kernels.matrix_units import (
        find_matrix_units,  # not above: it loads numba, which GPUs' runtimes do without
    )

    versions = {name: version(name) for name in ("numba", "llvmlite")}
    units = find_matrix_units()[1]
    return {"cpu": cpu_name(), "num_cores": core_partitions().whole.size, **versions, "matrix_units": units}


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, os.uname().machine)
