"""The composition root: an engine directory and a configuration become a running engine.

The only place that knows which runtime, runners, sampler and policies are put together.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from faser_backend.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.core.request import Limits
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.partition import core_partitions, split_name
from faser_backend.device.sampler import NumpySampler
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.step import Stepper
from faser_backend.policy.block_manager import BlockManager
from faser_backend.policy.knowledge import Knowledge
from faser_backend.policy.registry import make_policy
from faser_backend.policy.scheduler import Scheduler
from faser_backend.serving.partitions import free_memory_bytes, open_partitions, useful_splits
from faser_backend.serving.profiling.store import load_knowledge

_log = logging.getLogger(__name__)
KV_MEMORY_SHARE = 0.25  # of free memory, unless num_kv_blocks is given


class SystemClock:
    """The monotonic clock of this machine."""

    def now_ns(self) -> int:
        return time.perf_counter_ns()


def build_engine(engine_dir: Path, config: EngineConfig) -> Engine:
    """Loads and checks the directory, opens sessions and pools. Raises ManifestError or ConfigError."""
    manifest = EngineManifest.load(engine_dir)
    menu = core_partitions()
    splits, _ = useful_splits(menu, manifest, config.num_threads, free_memory_bytes())
    names = (WHOLE, *(split_name(*split) for split in splits))
    split = names[1] if splits else None
    if split is None and config.pipeline not in {"auto", "serial"}:
        _log.warning("pipeline = %s: %s; every step is serial", config.pipeline, menu.note)
    policy = make_policy(config, lambda: _load_knowledge(engine_dir, manifest).on(names), split)
    max_context = min(manifest.target.spec.max_context, manifest.draft.spec.max_context)
    num_blocks = choose_num_blocks(manifest, config, max_context)
    block_size = manifest.kv_block_size
    partitions, close = open_partitions(
        engine_dir,
        manifest,
        num_blocks=num_blocks,
        config=config,
        menu=menu,
        is_drafting=policy.is_drafting,
        wants_splits=any(name != WHOLE for name in policy.partitions),
    )
    vocab_size = manifest.target.spec.vocab_size
    blocks = BlockManager(
        num_blocks, block_size, config.max_num_seqs, max_context, can_reuse=config.enable_prefix_reuse
    )
    scheduler = Scheduler(
        blocks,
        policy,
        max_num_seqs=config.max_num_seqs,
        max_prefill_tokens=config.max_prefill_tokens,
        never_evicts=config.admission == "guaranteed_no_evict",
    )
    clock = SystemClock()
    sampler = NumpySampler(vocab_size, config.max_num_seqs)
    stepper = Stepper(scheduler, partitions, sampler, clock, uses_rejection=config.acceptance == "rejection")

    return Engine(stepper, Limits(vocab_size, max_context), clock, max_queue_size=config.max_queue_size, on_close=close)


def _load_knowledge(engine_dir: Path, manifest: EngineManifest) -> Knowledge:
    knowledge = load_knowledge(engine_dir, manifest)
    if not knowledge.costs.is_measured:
        _log.warning("%s has no profile: costs are conservative guesses; run `faser profile %s`", *[engine_dir] * 2)
    return knowledge


def choose_num_blocks(manifest: EngineManifest, config: EngineConfig, max_context: int) -> int:
    """Blocks for max_num_seqs full contexts, or what KV_MEMORY_SHARE of free memory holds.

    Raises ConfigError where not even one full context fits, which could deadlock.
    """
    size = manifest.kv_block_size
    one_context = -(-max_context // size)
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks < one_context:
            raise ConfigError(
                f"num_kv_blocks = {config.num_kv_blocks}: "
                f"one context of {max_context} tokens needs at least {one_context} blocks of {size}"
            )
        return config.num_kv_blocks
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    block_bytes = sum(KvPool.bytes_per_block(model.spec, size) for model in (manifest.target, manifest.draft))
    fitting = int(free_bytes * KV_MEMORY_SHARE) // block_bytes
    if fitting < one_context:
        raise ConfigError(
            f"free memory of {free_bytes >> 20} MiB: one context of {max_context} tokens needs "
            f"{one_context * block_bytes / KV_MEMORY_SHARE / 2**20:.0f} MiB free; set num_kv_blocks to override"
        )
    return min(config.max_num_seqs * one_context, fitting)
