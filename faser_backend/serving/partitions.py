"""Opens the partitions of a device: runners of both models on the whole of it and on its splits.

All runners of a model share one KV pool, so a step may use any partition. Every split loads the weights
again, for ONNX Runtime lays them out anew for each session: `useful_splits` says which are worth it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from faser_backend.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.lanes import ThreadLanes
from faser_backend.device.onnx_runtime import OrtRunner, useful_threads
from faser_backend.device.partition import CorePartition, PartitionMenu, split_name
from faser_backend.manifest import EngineManifest, ModelEngine
from faser_backend.pipeline.overlap import Partition

_log = logging.getLogger(__name__)
SPLIT_MEMORY_SHARE = 0.25  # of free memory, for the weights that splits load again

Split = tuple[CorePartition, CorePartition]  # (draft, target)


def open_partitions(
    engine_dir: Path,
    manifest: EngineManifest,
    *,
    num_blocks: int,
    config: EngineConfig,
    menu: PartitionMenu,
    is_drafting: bool,
    wants_splits: bool,
) -> tuple[dict[str, Partition], Callable[[], None]]:
    """Partitions by name, WHOLE always among them, and what closes all their lanes and runners.

    is_drafting: without it there is no draft, and nothing to overlap. wants_splits: lanes are of use; fewer
    splits than the menu has may be opened, and the log says why. Raises ConfigError and leaves nothing open.
    """
    with ExitStack() as stack:
        opener = _Opener(engine_dir, manifest.kv_block_size, num_blocks, config, stack)
        target = opener.runner(manifest.target, menu.whole)
        draft = opener.runner(manifest.draft, menu.whole) if is_drafting else None
        partitions = {WHOLE: Partition(target, draft, None)}
        if draft is not None and wants_splits:
            splits, reason = useful_splits(menu, manifest, config.num_threads, free_memory_bytes())
            _log.log(logging.INFO if splits else logging.WARNING, "splits opened: %s", reason)
            for split in splits:
                partitions[split_name(*split)] = opener.split(manifest, split, target.pool, draft.pool)
        return partitions, stack.pop_all().close


def useful_splits(
    menu: PartitionMenu, manifest: EngineManifest, num_threads: int | None, free_bytes: int
) -> tuple[list[Split], str]:
    """The splits of the menu that are worth their memory, and in words how many of how many and why."""
    num_cores = menu.whole.size
    if not menu.can_split:
        return [], f"none ({menu.note})"
    if num_threads is not None and num_threads < num_cores:
        return [], f"none (num_threads = {num_threads} of {num_cores} cores: a split uses them all)"
    filled = [split for split in menu.splits if useful_threads(manifest.draft, split[0]) == split[0].size]
    copy_bytes = manifest.target.weights.num_bytes + manifest.draft.weights.num_bytes
    num_fitting = int(free_bytes * SPLIT_MEMORY_SHARE) // copy_bytes
    splits = filled[:num_fitting]
    reason = f"{len(splits)} of {len(menu.splits)}"
    if splits:
        reason += f" ({', '.join(split_name(*split) for split in splits)})"
    reason += f"; each loads {copy_bytes >> 20} MiB of weights again"
    if len(filled) < len(menu.splits):
        reason += f"; the draft cannot use more than {filled[-1][0].size} core(s)"
    if len(splits) < len(filled):
        reason += f"; {SPLIT_MEMORY_SHARE:.0%} of {free_bytes >> 20} MiB of free memory hold no more"
    return splits, reason


def free_memory_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class _Opener:
    """Opens runners and lanes; `stack` closes them, the last opened first."""

    engine_dir: Path
    kv_block_size: int
    num_blocks: int
    config: EngineConfig
    stack: ExitStack

    def runner(self, model: ModelEngine, cores: CorePartition, pool: KvPool | None = None) -> OrtRunner:
        runner = OrtRunner(
            model,
            self.engine_dir,
            self.num_blocks,
            self.kv_block_size,
            cores,
            num_threads=self.config.num_threads,
            can_spin=self.config.can_spin,
            pool=pool,
        )
        self.stack.callback(runner.close)
        return runner

    def split(self, manifest: EngineManifest, split: Split, target_pool: KvPool, draft_pool: KvPool) -> Partition:
        """Runners that share the pools of the whole, each opened on its lane's own thread."""
        draft_cores, target_cores = split
        lanes = ThreadLanes(draft_cores, target_cores)
        self.stack.callback(lanes.close)  # should opening fail
        target = lanes.on_target(lambda: self.runner(manifest.target, target_cores, target_pool))
        draft = lanes.on_draft(lambda: self.runner(manifest.draft, draft_cores, draft_pool))
        self.stack.callback(lanes.close)  # before its runners: what is running ends first
        return Partition(target, draft, lanes)
