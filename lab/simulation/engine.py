"""The real engine over simulated ports: scheduler, policies, pipeline and block manager are those that serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from faser_backend.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.core.record import StepRecord
from faser_backend.core.request import Limits
from faser_backend.pipeline.assembly import Ports, assemble
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.phases import Partition
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel
from faser_backend.policy.registry import make_policy
from faser_backend.policy.speculation import Knowledge, SpeculationPolicy
from lab.simulation.acceptance import VOCAB_SIZE, AcceptanceProcess
from lab.simulation.clock import SimClock, SimLanes
from lab.simulation.knowledge import knowledge_of
from lab.simulation.proposer import SimProposer
from lab.simulation.runner import SimRunner
from lab.simulation.sampler import SimSampler

KV_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """A machine with a pair on it. assumptions: for the report, a sentence each."""

    name: str
    costs: CostModel
    process: AcceptanceProcess
    target_layers: tuple[int, ...]  # of each segment
    draft_layers: tuple[int, ...]
    exits: tuple[tuple[int, int], ...]  # (segment, layer) of each exit
    num_kv_tokens: int
    max_context: int
    assumptions: tuple[str, ...]

    def knowledge(self) -> Knowledge:
        """What policies are told of this world."""
        return knowledge_of(self.process, self.costs, self.exits)


@dataclass(frozen=True, slots=True)
class SimEngine:
    """An engine and the clock that its steps advance. Its policy may be replaced before the first step."""

    engine: Engine
    clock: SimClock
    observers: list[Callable[[StepRecord], None]]


def build_sim_engine(
    world: World,
    config: EngineConfig,
    *,
    seed: int,
    max_output_tokens: int,
    policy: SpeculationPolicy | None = None,
) -> SimEngine:
    """policy: instead of the one that config names. Raises ConfigError for what cannot be simulated."""
    if config.acceptance != "match":
        raise ConfigError(f"acceptance = {config.acceptance!r}: is not simulated; use 'match'")
    if policy is None:
        splits = [name for name in world.costs.partitions if name != WHOLE]
        policy = make_policy(config, world.knowledge, splits[len(splits) // 2] if splits else None)
    num_blocks = config.num_kv_blocks or world.num_kv_tokens // KV_BLOCK_SIZE
    one_context = -(-world.max_context // KV_BLOCK_SIZE)
    if num_blocks < one_context:
        raise ConfigError(
            f"{world.name}: KV memory of {num_blocks * KV_BLOCK_SIZE} tokens does not hold "
            f"one context of {world.max_context} tokens"
        )
    clock = SimClock()
    sampler = SimSampler(world.process, seed, config.max_num_seqs, max_output_tokens)
    ports = Ports(
        _partitions(world, clock, is_drafting=policy.is_drafting),
        sampler,
        clock,
        lambda times, block_tables: SimProposer(sampler, times, block_tables, clock, world.costs.overhead),
        num_blocks,
        KV_BLOCK_SIZE,
        Limits(VOCAB_SIZE, world.max_context + 1),
    )
    engine = assemble(ports, policy, config.model_copy(update={"enable_prefix_reuse": False}))
    return SimEngine(engine, clock, engine.stepper.observers)


def _partitions(world: World, clock: SimClock, *, is_drafting: bool) -> dict[str, Partition]:
    exits = frozenset(segment for segment, _ in world.exits)

    def runner(model: str, partition: str) -> SimRunner:
        is_target = model == TARGET
        return SimRunner(
            model,
            partition,
            world.costs,
            clock,
            num_layers=world.target_layers if is_target else world.draft_layers,
            exits=exits if is_target else frozenset(),
            vocab_size=VOCAB_SIZE,
        )

    lanes = SimLanes(clock, world.costs.overhead.lanes_us)
    return {
        name: Partition(
            runner(TARGET, name), runner(DRAFT, name) if is_drafting else None, None if name == WHOLE else lanes
        )
        for name in world.costs.partitions
    }
