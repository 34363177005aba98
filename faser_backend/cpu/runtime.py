"""`LlvmRuntime`: opens the parts of an engine on this machine's cores; implements device.runtime.Runtime."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from faser_backend.core.config import EngineConfig
from faser_backend.core.model import ModelSpec
from faser_backend.core.ports import Behind, GraphCounts
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.cpu.weights import available_memory, cpu_quota, useful_threads
from faser_backend.device.partition import CorePartition, PartitionMenu, ThreadLanes, core_partitions, split_name
from faser_backend.device.runtime import DRAFTS_IN_TURN, NO_DRAFT, ModelPair, OpenRunner, Runtime
from faser_backend.manifest import EngineManifest, ModelEngine

KV_MEMORY_SHARE = 0.25  # of free memory
Split = tuple[CorePartition, CorePartition]  # (draft, target)


class LlvmRuntime(Runtime[CorePartition, KvPool]):
    """The CPU's runtime for one engine directory. The caller owns everything that it opens.

    Calls are synchronous, and logits are in host memory, where the host draws tokens without a transfer: what the port
    asks of threads, queues and draft loops is nothing here.
    """

    def __init__(
        self,
        engine_dir: Path,
        manifest: EngineManifest,
        *,
        num_threads: int | None = None,
        menu: PartitionMenu[CorePartition] | None = None,
    ) -> None:
        """num_threads: see LlvmRunner; by default as many as the control group allows. menu: all cores by default."""
        # With more threads than it allows, the system stops all of them while one waits at a barrier for another.
        num_threads = num_threads or cpu_quota()
        self.kv_block_size = manifest.kv_block_size
        self.menu = menu or core_partitions()
        self.needs_warm_up = False
        self.graph_counts = GraphCounts()
        self.behind: Behind | None = None
        self._engine_dir, self._manifest, self._num_threads = engine_dir, manifest, num_threads
        models = ModelPair(manifest.target, manifest.draft)
        splits, self.splits_note = useful_splits(self.menu, models, num_threads)
        self.splits = tuple(splits)
        self._open = ExitStack()
        self._open.enter_context(_one_blas_thread())

    def free_bytes(self) -> int:
        """Returns the free memory. Weights are not subtracted: KV pools take only a share of it."""
        return available_memory()

    def kv_bytes(self, num_partitions: int, config: EngineConfig) -> int:
        """Returns KV_MEMORY_SHARE of the free memory."""
        return int(self.free_bytes() * KV_MEMORY_SHARE)

    def bytes_per_block(self, spec: ModelSpec) -> int:
        return KvPool.bytes_per_block(spec, self.kv_block_size, self._manifest.kv_cache_dtype)

    def open_pool(self, model: ModelEngine, num_blocks: int) -> KvPool:
        return KvPool(model.spec, num_blocks, self.kv_block_size, dtype=self._manifest.kv_cache_dtype)

    def fill_pool(self, pool: KvPool, numbers: np.ndarray) -> None:
        """Writes every page: pages that were never written share one page in the cache."""
        pool.storage[:] = numbers

    def open_runner(self, model: ModelEngine, share: CorePartition, pool: KvPool) -> OpenRunner:
        # Not above: it loads numba, which other runtimes do not need.
        from faser_backend.cpu.draft_runners import LlvmBlockRunner, LlvmHeadRunner
        from faser_backend.cpu.runner import LlvmRunner

        kind, owner = LlvmRunner, None
        if model.spec.reads_target:
            kind, owner = LlvmBlockRunner if model.spec.block_size else LlvmHeadRunner, self._manifest.target
        options = {"num_threads": self._num_threads, "compute": self._manifest.compute}
        return kind(model, self._engine_dir, share, pool, owner, **options)

    def open_lanes(self, draft: CorePartition, target: CorePartition) -> ThreadLanes:
        return ThreadLanes(draft, target)

    def open_sampler(self, vocab_size: int, max_num_seqs: int) -> NumpySampler:
        return NumpySampler(vocab_size, max_num_seqs)

    def close(self) -> None:
        self._open.close()


class _Blas:
    """The threads of numpy's products, which all runtimes of this process share."""

    lock = threading.RLock()  # the collector may end an abandoned runtime in the midst of it
    num_runtimes = 0
    limits: threadpool_limits


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Limits numpy's products to one thread, until the last of several runtimes ends.

    Its threads spin for tens of milliseconds after a matrix product of a policy. They took cores from the next calls,
    which then ran a quarter longer.
    """
    with _Blas.lock:
        if not _Blas.num_runtimes:
            _Blas.limits = threadpool_limits(1, user_api="blas")
        _Blas.num_runtimes += 1
    try:
        yield
    finally:
        with _Blas.lock:
            _Blas.num_runtimes -= 1
            if not _Blas.num_runtimes:
                _Blas.limits.restore_original_limits()


def useful_splits(
    menu: PartitionMenu[CorePartition], models: ModelPair, num_threads: int | None
) -> tuple[list[Split], str]:
    """Returns the splits on which both models use all their cores, and a note on how many and why."""
    num_cores, draft = menu.whole.size, models.draft
    if draft is None:
        return [], NO_DRAFT
    if draft.spec.reads_target:
        return [], DRAFTS_IN_TURN
    if not menu.splits:
        return [], f"none ({menu.note})"
    if num_threads is not None and num_threads < num_cores:
        return [], f"none (num_threads = {num_threads} of {num_cores} cores: a split uses them all)"
    splits = [split for split in menu.splits if useful_threads(draft, split[0]) == split[0].size]
    reason = f"{len(splits)} of {len(menu.splits)} ({', '.join(split_name(*split) for split in splits)})"
    if len(splits) < len(menu.splits):
        reason += f"; the draft cannot use more than {splits[-1][0].size} core(s)"
    return splits, reason


def cpu_identity() -> dict[str, str | int]:
    """Returns the facts that determine the time of calls: processor, number of cores, compiler, matrix units."""
    # Not above: it loads numba, which other runtimes do not need.
    from faser_backend.cpu.kernels.matrix_units import find_matrix_units

    versions = {name: version(name) for name in ("numba", "llvmlite")}
    num_cores, units = core_partitions().whole.size, find_matrix_units()[1]
    num_cores = min(num_cores, cpu_quota() or num_cores)
    return {"cpu": cpu_name(), "num_cores": num_cores, **versions, "matrix_units": units}


def cpu_name() -> str:
    """Returns the processor's model name, or its architecture if the system does not report one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, os.uname().machine)
