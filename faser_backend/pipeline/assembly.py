"""The one place that assembles an engine from ports, a policy and a configuration.

Serving, the simulator, the laboratory and the tests all call it, each with their own ports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.graph_counts import GraphCounts
from faser_backend.core.ports import Clock, Partition, Sampler
from faser_backend.core.record import StepRecord
from faser_backend.core.request import Limits
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.propose import Proposer
from faser_backend.pipeline.step import StepRunner
from faser_backend.pipeline.timing import PhaseTimes
from faser_backend.policy.block_manager import BlockManager
from faser_backend.policy.scheduler import Scheduler
from faser_backend.policy.speculation import MAX_DRAFT_LAG, SpeculationPolicy


@dataclass(frozen=True)
class Ports:
    """Everything that an engine runs on, given to it from outside."""

    partitions: Mapping[str, Partition]  # by name; WHOLE is one of them
    sampler: Sampler
    clock: Clock
    make_proposer: Callable[[PhaseTimes, np.ndarray], Proposer]  # from its lane's times and the block tables, by slot
    num_blocks: int
    kv_block_size: int
    limits: Limits
    bind_thread: Callable[[], None] = lambda: None  # called first in every step, on the thread that steps
    close: Callable[[], None] = lambda: None  # called when the engine closes
    is_fatal: Callable[[BaseException], bool] = lambda error: False  # whether a step's error breaks the device for good
    graph_counts: GraphCounts = field(default_factory=GraphCounts)  # of the device


def assemble(
    ports: Ports,
    policy: SpeculationPolicy,
    config: EngineConfig,
    observers: Iterable[Callable[[StepRecord], None]] = (),
) -> Engine:
    """Returns the engine. config.policy is not read. `observers` are called after each step that verified."""
    blocks = BlockManager(
        ports.num_blocks,
        ports.kv_block_size,
        config.max_num_seqs,
        ports.limits.max_context,
        can_reuse=config.enable_prefix_reuse,
    )
    proposer = ports.make_proposer(PhaseTimes(ports.clock), blocks.block_tables) if policy.is_drafting else None
    scheduler = Scheduler(
        blocks,
        policy,
        max_num_seqs=config.max_num_seqs,
        max_prefill_tokens=config.max_prefill_tokens,
        max_gap_ms=config.max_gap_ms,
        never_evicts=config.admission == "guaranteed_no_evict",
        max_draft_lag=MAX_DRAFT_LAG if proposer is None else proposer.max_lag,
    )
    step_runner = StepRunner(scheduler, ports.partitions, ports.sampler, ports.clock, proposer)
    step_runner.observers.extend(observers)
    return Engine(
        step_runner,
        ports.limits,
        ports.clock,
        max_queue_size=config.max_queue_size,
        bind_thread=ports.bind_thread,
        on_close=ports.close,
        is_fatal=ports.is_fatal,
        graph_counts=ports.graph_counts,
    )
