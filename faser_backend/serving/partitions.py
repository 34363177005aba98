"""Opens the partitions of a runtime: runners of both models on the whole device and on splits of it.

All runners of a model share one KV pool, so a step may use any partition. Knows no runtime by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from faser_backend.core.decision import WHOLE
from faser_backend.core.ports import Sampler
from faser_backend.device.partition import split_name
from faser_backend.device.runtime import ModelPair, OpenRunner
from faser_backend.manifest import ModelEngine
from faser_backend.pipeline.phases import Partition
from faser_backend.serving.runtimes import AnyRuntime

_log = logging.getLogger(__name__)


def open_partitions(
    runtime: AnyRuntime,
    models: ModelPair,
    sampler: Sampler,
    *,
    num_blocks: int,
    names: Collection[str],
    is_drafting: bool,
) -> tuple[dict[str, Partition], Callable[[], None]]:
    """Partitions by name, WHOLE always among them, and what closes all their lanes and runners.

    is_drafting: without it, or without a draft model, there is nothing to overlap. names: partitions that are of
    use; of the splits among them those that the runtime holds to be worth it are opened, and the log says why.
    Raises ConfigError and leaves nothing open.
    """
    with ExitStack() as stack:
        opener = _Opener(runtime, sampler, stack)
        target_pool = runtime.open_pool(models.target, num_blocks)
        target = opener.runner(models.target, runtime.menu.whole, target_pool)
        if not is_drafting or models.draft is None:
            return {WHOLE: Partition(target, None, None)}, stack.pop_all().close
        draft_pool = runtime.open_pool(models.draft, num_blocks)
        if models.draft.spec.reads_target:
            draft_pool.features = target_pool.features  # the head reads what the target writes
        draft = opener.runner(models.draft, runtime.menu.whole, draft_pool)
        partitions = {WHOLE: Partition(target, draft, None, runtime.open_draft_loop(draft, sampler))}
        if any(name != WHOLE for name in names):
            _log.log(logging.INFO if runtime.splits else logging.WARNING, "splits: %s", runtime.splits_note)
            for split in runtime.splits:
                if split_name(*split) in names:
                    partitions[split_name(*split)] = opener.split(models, split, target_pool, draft_pool)
        return partitions, stack.pop_all().close


@dataclass(frozen=True, slots=True)
class _Opener:
    """Opens runners and lanes; `stack` closes them, the last opened first."""

    runtime: AnyRuntime
    sampler: Sampler
    stack: ExitStack

    def runner(self, model: ModelEngine, share: Any, pool: Any) -> OpenRunner:
        runner = self.runtime.open_runner(model, share, pool)
        self.stack.callback(runner.close)
        return runner

    def split(self, models: ModelPair, split: tuple[Any, Any], target_pool: Any, draft_pool: Any) -> Partition:
        """Runners that share the pools of the whole, each opened on its lane's own thread."""
        draft_model, (draft_share, target_share) = models.draft, split
        assert draft_model is not None
        lanes = self.runtime.open_lanes(draft_share, target_share)
        self.stack.callback(lanes.close)  # should opening fail
        target = lanes.on_target(lambda: self.runner(models.target, target_share, target_pool))
        draft = lanes.on_draft(lambda: self.runner(draft_model, draft_share, draft_pool))
        draft_loop = lanes.on_draft(lambda: self.runtime.open_draft_loop(draft, self.sampler))
        self.stack.callback(lanes.close)  # before its runners: what is running ends first
        return Partition(target, draft, lanes, draft_loop)
