"""The real engine over simulated ports: scheduler, policies, pipeline and block manager are those that serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, Decision
from faser_backend.core.errors import ConfigError
from faser_backend.core.ports import Partition, PhaseTimes
from faser_backend.core.request import Limits, Request, Sampling
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.lab.answers import Answer, summarise
from faser_backend.lab.contestants import ORACLE
from faser_backend.lab.drive import OpenLoop, finished, serve_requests
from faser_backend.lab.simulation.acceptance import VOCAB_SIZE, AcceptanceProcess, Outcomes, knowledge_of
from faser_backend.lab.simulation.ports import SimClock, SimLanes, SimProposer, SimRunner, SimSampler
from faser_backend.lab.steps import StepLog, figures
from faser_backend.lab.traces import Trace
from faser_backend.pipeline.engine import Engine, Ports, assemble
from faser_backend.pipeline.joint import JointProposer
from faser_backend.pipeline.ngram import NgramProposer
from faser_backend.pipeline.propose import Proposer
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel
from faser_backend.policy.registry import make_policy
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, Knowledge, SpeculationPolicy

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
        """Returns what policies know of this world."""
        return knowledge_of(self.process, self.costs, self.exits)


@dataclass(frozen=True, slots=True)
class SimEngine:
    """An engine and the clock that its steps advance. Its policy may be replaced before the first step."""

    engine: Engine
    clock: SimClock
    num_layers: int  # of the target


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of N requests in the order of the trace; times in virtual seconds."""

    answers: list[Answer]
    seconds: float  # from the start of the run to the last token
    log: StepLog
    num_layers: int
    num_preemptions: int

    def summary(self) -> dict[str, Any]:
        """Returns plain figures for tables and JSON."""
        steps = figures(self.log, self.num_layers)
        return {
            "num_requests": len(self.answers),
            "num_tokens": sum(answer.num_tokens for answer in self.answers),
            "makespan_s": self.seconds,
            **summarise(self.answers, self.seconds),
            **steps,
            "pruned_share": steps["rows_pruned"] / max(steps["rows_drafted"] - steps["rows_trimmed"], 1),
            "num_preemptions": self.num_preemptions,
        }


def run_open_loop(sim: SimEngine, trace: Trace, temperatures: Sequence[float] = (0.0,)) -> Outcome:
    """Submits requests at the trace's times, whatever the engine does. Raises FaserError if one fails.

    temperatures: of the requests, in rotation.
    """
    lengths = zip(trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist(), strict=True)
    requests = [
        Request(str(index), np.zeros(num_prompt, np.int64), num_output, Sampling(temperature, seed=index))
        for index, ((num_prompt, num_output), temperature) in enumerate(zip(lengths, cycle(temperatures)))
    ]
    log = StepLog(sim.engine, with_laps=False)
    run = serve_requests(sim.engine, sim.clock, requests, OpenLoop(trace.arrivals_s.tolist()))
    answers, seconds = finished(run)
    return Outcome(answers, seconds, log, sim.num_layers, sim.engine.metrics().num_preemptions)


def build_sim_engine(
    world: World,
    config: EngineConfig,
    *,
    seed: int,
    max_output_tokens: int,
    policy: SpeculationPolicy | None = None,
    name: str = "",
) -> SimEngine:
    """policy: instead of the one that config names; name ORACLE: the one that knows the outcomes. Raises ConfigError
    for what cannot be simulated."""
    if config.acceptance != "match":
        raise ConfigError(f"acceptance = {config.acceptance!r}: is not simulated; use 'match'")
    outcomes = Outcomes(world.process, seed, config.max_num_seqs, max_output_tokens)
    if name == ORACLE:
        policy = OraclePolicy(outcomes, world.costs)
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
    sampler = SimSampler(outcomes)

    def make_proposer(times: PhaseTimes, block_tables: np.ndarray) -> Proposer:
        model = SimProposer(sampler, times, block_tables, clock, world.costs)
        if config.draft != "model+ngram":
            return model
        return JointProposer(model, NgramProposer(times), config.max_prefill_tokens)

    partitions = _partitions(world, clock, is_drafting=policy.is_drafting)
    limits = Limits(VOCAB_SIZE, world.max_context + 1)
    ports = Ports(partitions, sampler, clock, make_proposer, num_blocks, KV_BLOCK_SIZE, limits)
    engine = assemble(ports, policy, config.model_copy(update={"enable_prefix_reuse": False}))
    return SimEngine(engine, clock, sum(world.target_layers))


def _partitions(world: World, clock: SimClock, *, is_drafting: bool) -> dict[str, Partition]:
    exits = frozenset(segment for segment, _ in world.exits)

    def runner(model: str, partition: str) -> SimRunner:
        layers, own_exits = (world.target_layers, exits) if model == TARGET else (world.draft_layers, frozenset[int]())
        return SimRunner(model, partition, world.costs, clock, num_layers=layers, exits=own_exits)

    lanes = SimLanes(clock, world.costs.overhead.lanes_us)
    return {
        name: Partition(
            runner(TARGET, name), runner(DRAFT, name) if is_drafting else None, None if name == WHOLE else lanes
        )
        for name in world.costs.partitions
    }


class OraclePolicy(SpeculationPolicy):
    """The oracle: drafts exactly the tokens that will be accepted, and so verifies only rows that emit one.

    A SpeculationPolicy that reads the planted outcomes, which none that serves can know. Of what will be accepted it
    drafts as much as earns most tokens per time in the step, by the costs of the world, in turns on the whole device;
    its chains are no longer than those of policies that adapt. It looks no further than a step: where draft calls are
    expensive and requests come one by one, a policy whose steps are shorter may answer sooner.
    """

    def __init__(self, outcomes: Outcomes, costs: CostModel) -> None:
        self._outcomes, self._costs = outcomes, costs

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        accepted = np.array([min(self._num_accepted(sequence), MAX_ADAPTIVE_TOKENS) for sequence in sequences])
        lengths = np.arange(int(accepted.max()) + 1)
        rows = np.minimum(accepted[:, None], lengths).sum(axis=0) + len(sequences)  # [L]: all emit a token
        context = self._costs.batch_context([float(sequence.num_tokens) for sequence in sequences])
        best = int(np.argmax(rows / self._step_us(rows, accepted, lengths, context)))
        return Decision(np.minimum(accepted, best).tolist())

    def _num_accepted(self, sequence: RunningSequence) -> int:
        found = self._outcomes.num_accepted(sequence.slot, sequence.num_tokens)
        return min(found, sequence.num_remaining_tokens - 1)  # a request's last token is a bonus token

    def _step_us(self, rows: np.ndarray, accepted: np.ndarray, lengths: np.ndarray, context: int) -> np.ndarray:
        """[L] time of a step that drafts up to each length."""
        size, overhead = accepted.size, self._costs.overhead
        drafting = np.count_nonzero(accepted[:, None] > lengths[:-1], axis=0)  # [L - 1] chains in each draft call
        draft_us = np.zeros(0)
        if drafting.size:
            calls = self._costs.call_us(DRAFT, WHOLE, drafting, drafting, context, num_logit_rows=drafting)
            draft_us = calls + overhead.draft_call(drafting)
        verify_us = self._costs.call_us(TARGET, WHOLE, rows, size, context)
        around = overhead.step(size, rows) + (lengths > 0) * overhead.draft_round(size)
        return verify_us + around + np.concatenate([[0.0], np.cumsum(draft_us)])
