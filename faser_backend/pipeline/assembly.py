"""The one place that assembles an engine from ports, a policy and a configuration.

Serving, the simulator, the laboratory and the tests all call it, each with their own ports.
"""

from __future__ import annotations

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.pipeline.adapters import Adapters
from faser_backend.pipeline.engine import Engine, Ports
from faser_backend.pipeline.step import StepRunner
from faser_backend.pipeline.timing import PhaseTimes
from faser_backend.policy.block_manager import BlockManager
from faser_backend.policy.scheduler import Scheduler
from faser_backend.policy.speculation import MAX_DRAFT_LAG, SpeculationPolicy


def assemble(ports: Ports, policy: SpeculationPolicy, config: EngineConfig) -> Engine:
    """Returns the engine. config.policy is not read."""
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
    step_runner = StepRunner(scheduler, ports.partitions, ports.sampler, ports.clock, proposer, ports.behind)
    adapters = Adapters(ports.partitions[WHOLE].target, config.max_lora_rank, config.lora_cache_bytes)
    return Engine(step_runner, ports, adapters, max_queue_size=config.max_queue_size)
