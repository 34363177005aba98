"""The engine: an inbox of requests in front of the step, and the outputs behind it.

`submit`, `cancel` and `stop` may be called from any thread; everything else belongs to the one
thread that calls `step`. Commands take effect at the start of the next step.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, PipelineMode
from faser_backend.core.errors import ErrorCode, Failure, QueueFullError, RequestError
from faser_backend.core.frontier import Frontier
from faser_backend.core.plan import InFlight, StepPlan, StepRecord
from faser_backend.core.ports import Behind, Clock, GraphCounts, Partition, PhaseTimes, Sampler
from faser_backend.core.request import EngineOutput, FinishReason, Limits, Request
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.adapters import Adapters
from faser_backend.pipeline.commit import final_output
from faser_backend.pipeline.propose import Proposer
from faser_backend.pipeline.step import StepRunner
from faser_backend.policy.block_manager import BlockManager
from faser_backend.policy.scheduler import Scheduler
from faser_backend.policy.speculation import MAX_DRAFT_LAG, SpeculationPolicy

_log = logging.getLogger(__name__)
SOURCES = ("model", "ngram", "client")  # of draft tokens, by number of the source
NUM_POSITIONS = 8  # of a chain, whose acceptance is counted one by one
PLAIN = "plain"  # a step that verified no draft tokens and drafted none
STEP_KINDS = (PLAIN, *(mode.value for mode in PipelineMode))
MAX_FAILED_STEPS = 8  # in a row, after which the engine stops


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
    prepare: Callable[[Engine], None] = lambda engine: None  # warms it up, on the thread that steps
    close: Callable[[], None] = lambda: None  # called when the engine closes
    is_fatal: Callable[[BaseException], bool] = lambda error: False  # whether no further step can succeed after it
    graph_counts: GraphCounts = field(default_factory=GraphCounts)  # of the device
    behind: Behind | None = None  # see device/runtime.py


@dataclass(slots=True)
class EngineMetrics:
    """A snapshot of counters. Blocks and requests are gauges; the rest are totals since the start."""

    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 0
    num_scheduled: int = 0  # in the last step
    num_context_tokens: int = 0  # prefilled in the last step
    num_paused: int = 0  # waiting after a preemption
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or evictable
    num_reused_blocks: int = 0
    kv_block_size: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_drafts: int = 0  # verifications of a sequence that had draft tokens
    num_accepted_by_position: list[int] = field(default_factory=lambda: [0] * NUM_POSITIONS)
    num_steps_by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STEP_KINDS, 0))  # that verified
    tokens_per_second: float = 0.0  # at the optimum of the last decision, 0 where the policy has none
    num_drafted_by_source: Counter[str] = field(default_factory=Counter)  # who drafted: SOURCES
    num_accepted_by_source: Counter[str] = field(default_factory=Counter)
    num_pruned: int = 0  # rows that left verifications at an exit
    num_row_layers: int = 0  # computed in verifications
    num_graphs: int = 0  # captured
    num_failed_captures: int = 0  # calls that run without a graph because theirs could not be captured
    phase_times_ns: dict[str, int] = field(default_factory=dict)


class Engine:
    """Continuous batching over one draft/target pair. `close` frees what the runners hold."""

    def __init__(self, step_runner: StepRunner, ports: Ports, adapters: Adapters, *, max_queue_size: int) -> None:
        self.limits = ports.limits
        self.bind_thread, self.behind = ports.bind_thread, ports.behind
        self.step_runner = step_runner  # public: observers of steps and other policies are set here
        self._scheduler = step_runner.scheduler
        self._ports, self._max_queue_size = ports, max_queue_size
        self._inbox: deque[Sequence] = deque()
        self._endings: deque[tuple[str, FinishReason]] = deque()
        self._live: set[str] = set()  # submitted and not yet ended, guarded by _condition
        self.adapters = adapters
        self._condition = threading.Condition()
        self._sequences: dict[str, Sequence] = {}  # inside the engine, owned by the step thread
        self._in_flight = InFlight.empty()  # what a step left for the next one
        self._metrics = EngineMetrics()
        self._num_failed_in_a_row = 0  # steps
        step_runner.observers.append(self._count_round)

    # -- any thread ------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Validates and queues a request. Raises RequestError or QueueFullError; nothing else moves."""
        request.validate(self.limits)
        with self._condition:
            if request.request_id in self._live:
                raise RequestError("request_id", request.request_id, "is already in use by a running request")
            self._live.add(request.request_id)
        try:
            named, adapter = self.adapters.acquire(request)
            sequence = Sequence.from_request(named, self._ports.clock.now_ns(), adapter)
            with self._condition:
                if self._max_queue_size and self.num_waiting >= self._max_queue_size:
                    raise QueueFullError(self._max_queue_size)
                self._inbox.append(sequence)
                self._condition.notify()
        except BaseException:
            self._end_live([request.request_id])
            raise

    def cancel(self, request_id: str) -> bool:
        return self.end(request_id, FinishReason.CANCELLED)

    def end(self, request_id: str, reason: FinishReason) -> bool:
        """Ends a request as CANCELLED, or as STOPPED, a normal shorter answer. Returns whether it was alive."""
        with self._condition:
            is_live = request_id in self._live
            if is_live:
                self._endings.append((request_id, reason))
                self._condition.notify()
            return is_live

    @property
    def num_waiting(self) -> int:
        return len(self._inbox) + len(self._scheduler.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._inbox or self._sequences)

    def wait_for_work(self, timeout_s: float) -> bool:
        """Blocks until there is work or the time is up. Returns has_work."""
        with self._condition:
            return self._condition.wait_for(lambda: self.has_work, timeout_s)

    # -- the step thread ----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Warms up the device, as some handles belong to a thread. Call once, before the first step."""
        self._ports.prepare(self)

    def step(self) -> list[EngineOutput]:
        """Runs one step. If the step raises, the requests in it fail and the others go on. Raises an error that breaks
        the device, and the error of the last of MAX_FAILED_STEPS failed steps in a row."""
        self.bind_thread()
        outputs = self._take_commands()
        plan = self.step_runner.plan(self._in_flight)
        self._in_flight = plan.in_flight
        self._metrics.num_preemptions += len(plan.preempted)
        self._metrics.num_reused_blocks += plan.num_reused_blocks
        if plan.is_empty:
            return outputs
        try:
            stepped, self._in_flight = self.step_runner.run(plan)
        except Exception as error:
            self._num_failed_in_a_row += 1
            if self._num_failed_in_a_row >= MAX_FAILED_STEPS or self._ports.is_fatal(error):
                raise  # a broken device would fail every further step: the engine has to be restarted
            _log.exception("a step failed; its requests fail, the others go on")
            return outputs + self._fail(plan, error)
        self._num_failed_in_a_row = 0
        self._count(plan, stepped)
        self._forget(output.request_id for output in stepped if output.is_final)
        return outputs + stepped

    def _take_commands(self) -> list[EngineOutput]:
        """Adds new sequences to the scheduler, and removes ended ones with their blocks."""
        if not (self._inbox or self._endings):
            return []
        with self._condition:
            arrived, endings = list(self._inbox), list(self._endings)
            for sequence in arrived:
                self._sequences[sequence.request.request_id] = sequence
                self._scheduler.add(sequence)
            self._inbox.clear()
            # An ending may come while its request is being submitted.
            self._endings = deque(each for each in endings if each[0] in self._live and each[0] not in self._sequences)
        outputs = []
        for request_id, reason in endings:
            sequence = self._sequences.get(request_id)
            if sequence is not None:  # it may have finished in between
                self.step_runner.release(sequence)
                outputs.append(final_output(sequence, reason))
                self._forget([request_id])
        return outputs

    def _fail(self, plan: StepPlan, error: Exception) -> list[EngineOutput]:
        self._metrics.num_failed_steps += 1
        outputs = []
        for sequence in [*plan.decodes, *plan.drafts, *(chunk.sequence for chunk in plan.prefills)]:
            request_id = sequence.request.request_id
            if request_id in self._sequences:
                if sequence.slot >= 0:  # not if commit had already released it
                    self.step_runner.release(sequence)
                message = f"the step of this request failed: {type(error).__name__}: {error}"
                outputs.append(final_output(sequence, FinishReason.ERROR, error=Failure(ErrorCode.INTERNAL, message)))
                self._forget([request_id])
        return outputs

    def _forget(self, request_ids: Iterable[str]) -> None:
        ended = list(request_ids)
        if ended:
            self._end_live(ended)
            for request_id in ended:
                del self._sequences[request_id]

    def _end_live(self, request_ids: list[str]) -> None:
        self.adapters.release(request_ids)
        with self._condition:
            self._live.difference_update(request_ids)

    def _count(self, plan: StepPlan, outputs: list[EngineOutput]) -> None:
        metrics = self._metrics
        metrics.num_steps += 1
        metrics.num_scheduled = len({*plan.decodes, *(chunk.sequence for chunk in plan.prefills)})
        metrics.num_context_tokens = sum(chunk.num_tokens for chunk in plan.prefills)
        metrics.num_emitted += sum(len(output.token_ids) for output in outputs)

    def _count_round(self, record: StepRecord) -> None:
        metrics, decision, is_drafted = self._metrics, record.plan.decision, record.frontier.num_drafted.any()
        if is_drafted:
            self._count_drafts(record.frontier, record.acceptance.num_accepted)
        metrics.num_pruned += int((record.frontier.num_rows - record.verification.num_kept).sum())
        is_plain = not is_drafted and not record.plan.drafts
        metrics.num_steps_by_kind[PLAIN if is_plain else decision.mode.value] += 1
        if decision.num_draft_tokens:  # a step of new sequences alone comes without a decision
            metrics.tokens_per_second = 1e6 * decision.tokens_per_us
        metrics.num_row_layers += record.verification.num_row_layers

    def _count_drafts(self, frontier: Frontier, accepted: np.ndarray) -> None:
        metrics, proposer = self._metrics, self.step_runner.proposer
        names = ("model" if proposer is None else proposer.main_source, *SOURCES[1:])
        columns = (frontier.sources, frontier.num_drafted, accepted)
        for source, num_drafted, num_accepted in zip(*(column.tolist() for column in columns), strict=True):
            metrics.num_drafted += num_drafted
            metrics.num_accepted += num_accepted
            metrics.num_drafts += num_drafted > 0
            for position in range(min(NUM_POSITIONS, num_accepted)):
                metrics.num_accepted_by_position[position] += 1
            metrics.num_drafted_by_source[names[source]] += num_drafted
            metrics.num_accepted_by_source[names[source]] += num_accepted

    def metrics(self) -> EngineMetrics:
        """Returns the live metrics. On another thread than the step's they may be one step old."""
        metrics, blocks = self._metrics, self._scheduler.blocks
        metrics.num_running = len(self._scheduler.running)
        metrics.num_waiting = self.num_waiting
        metrics.num_paused = sum(sequence.stats.num_preemptions > 0 for sequence in list(self._scheduler.waiting))
        metrics.max_num_seqs = self._scheduler.max_num_seqs
        metrics.num_blocks = blocks.num_blocks
        metrics.num_free_blocks = blocks.num_free_blocks
        metrics.kv_block_size = blocks.block_size
        metrics.num_graphs = self._ports.graph_counts.num_graphs
        metrics.num_failed_captures = self._ports.graph_counts.num_failed_captures
        metrics.phase_times_ns = self.step_runner.phase_times_ns
        return metrics

    def reset_metrics(self) -> None:
        """Resets the counters. Call only when idle."""
        self._metrics = EngineMetrics()

    def check_integrity(self) -> None:
        """Asserts the invariants of every owner of state. For tests and failing steps."""
        self._scheduler.check_integrity()
        held = {*self._scheduler.running, *self._scheduler.waiting}
        assert held == set(self._sequences.values())

    def close(self) -> None:
        self._ports.close()


def assemble(ports: Ports, policy: SpeculationPolicy, config: EngineConfig) -> Engine:
    """Returns the engine of a server, simulator or test, each with its own ports. config.policy is not read."""
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
