"""The engine in virtual time: exact clocks, one text for every policy, no losses, a queue known from textbooks."""

from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, PipelineMode, TrimRule
from faser_backend.core.errors import ConfigError
from faser_backend.core.plan import StepRecord
from faser_backend.lab.checks.control_worlds import call
from faser_backend.lab.simulation.acceptance import AcceptanceProcess, demo_process
from faser_backend.lab.simulation.engine import Outcome, World, build_sim_engine, run_open_loop
from faser_backend.lab.traces import Trace
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel, OverheadCost
from faser_backend.policy.registry import FixedLength
from tests.support.forcing import ADMITS_ALL, Forced, forced
from tests.support.harness import SPLIT

FREE = OverheadCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
ALWAYS, NEVER = 100.0, -100.0


def world(
    process: AcceptanceProcess | None = None, overhead: OverheadCost = FREE, num_kv_tokens: int = 4096, exits: int = 0
) -> World:
    """Target: 100 us and 10 us a row, draft: 20 us; on the split 200 us and 10 us a row, and 50 us."""
    last = [call(0.0, 0.0)] * exits  # the first segment takes all of the time
    costs = CostModel(
        {
            (TARGET, WHOLE): (call(100.0, 10.0), *last),
            (DRAFT, WHOLE): (call(20.0, 0.0),),
            (TARGET, SPLIT): (call(200.0, 10.0), *last),
            (DRAFT, SPLIT): (call(50.0, 0.0),),
        },
        overhead,
        np.zeros(1),
        is_measured=True,
    )
    process = (process or demo_process("sampled")).with_exits((0.8,) * exits)
    layers = (4,) * (1 + exits)
    segments = tuple((index, 4 * (index + 1)) for index in range(exits))
    return World("test", costs, process, layers, (1,), segments, num_kv_tokens, 512, ())


def certain(shift: float) -> AcceptanceProcess:
    return replace(demo_process("sampled"), shifts=(shift,))


def trace_of(*lengths: tuple[int, int], gap_s: float = 0.0) -> Trace:
    prompts, outputs = np.array(lengths).T
    return Trace(np.arange(len(lengths)) * gap_s, prompts, outputs, "made up")


def run(
    where: World, trace: Trace, policy: str = "fixed:2", *, seed: int = 0, chosen=None, observer=None, **options
) -> Outcome:
    config = EngineConfig.from_options(policy=policy, max_queue_size=0, **options)
    longest = int(trace.num_output_tokens.max())
    sim = build_sim_engine(where, config, seed=seed, max_output_tokens=longest, policy=chosen)
    if observer is not None:
        sim.engine.step_runner.observers.append(observer)
    outcome = run_open_loop(sim, trace)
    sim.engine.check_integrity()
    metrics = sim.engine.metrics()
    assert metrics.num_free_blocks == metrics.num_blocks, "blocks leaked"
    assert metrics.num_failed_steps == 0
    return outcome


def makespan_us(outcome: Outcome) -> float:
    return round(outcome.seconds * 1e6, 2)


def tokens_of(outcome: Outcome) -> list[list[int]]:
    return [answer.token_ids for answer in outcome.answers]


PROMPT_US = (100 + 4 * 10) + (100 + 10) + 20  # four tokens, the anchor (padded calls do not mix), and the draft


def test_time_of_a_serial_run_in_which_all_or_nothing_is_accepted():
    # Three rounds of two draft calls and three rows give nine tokens behind the first.
    assert makespan_us(run(world(certain(ALWAYS)), trace_of((5, 10)))) == PROMPT_US + 3 * (2 * 20 + 100 + 3 * 10)
    # Two, one and no draft tokens: a request never drafts past its end.
    rounds = (2 * 20 + 130) + (20 + 120) + 110
    outcome = run(world(certain(NEVER)), trace_of((5, 4)))
    assert makespan_us(outcome) == PROMPT_US + rounds
    assert outcome.summary()["mean_accepted"] == 0


def test_overhead_is_charged_once_per_step_and_draft_call():
    overhead = OverheadCost(7.0, 2.0, 1.0, 5.0, 3.0, 0.0, 0.0, 0.0)
    taken, freely = (makespan_us(run(world(certain(ALWAYS), each), trace_of((5, 10)))) for each in (overhead, FREE))
    assert taken - freely == (7 + 2 + 1) + 3 * ((7 + 2 + 3 * 1) + 2 * (5 + 3))


def two_tokens(mode: PipelineMode, trim: TrimRule | None = None) -> Forced:
    """Two draft tokens in a given mode, on the split where it is not serial."""
    return Forced(FixedLength(2), forced(mode, trim=trim))


TRIMMING = replace(FREE, trim_us=7.0, trim_sequence_us=3.0)


def test_what_trimming_takes_is_charged_per_draft_call_and_chain_that_it_extends():
    where, freely = world(certain(ALWAYS), TRIMMING), world(certain(ALWAYS))
    trace, records = trace_of((5, 10), (5, 9)), list[StepRecord]()
    trimmed = two_tokens(PipelineMode.SERIAL, ADMITS_ALL)
    extra = makespan_us(run(where, trace, chosen=trimmed, observer=records.append))
    extra -= makespan_us(run(freely, trace, chosen=trimmed))
    # In the last of three rounds the second request has two tokens to go and drafts one.
    first, *rounds = records
    assert [record.frontier.num_drafted.tolist() for record in rounds] == [[2, 2], [2, 2], [2, 1]]
    assert first.propose_us == 0
    assert [record.propose_us for record in rounds] == [2 * 20 + 3 * (7 + 2 * 3)] * 2 + [2 * 20 + 3 * 7 + 5 * 3]
    assert [record.step_us - record.propose_us - record.verify_us for record in rounds[1:]] == [0, 0]
    assert extra == 2 * 3 * (7 + 2 * 3) + 3 * 7 + 5 * 3
    assert makespan_us(run(where, trace)) == makespan_us(run(freely, trace)), "no decision depends on confidence"


def test_an_overlapped_step_takes_the_longer_of_its_phases():
    records: list[StepRecord] = []
    where = world(certain(ALWAYS), OverheadCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, lanes_us=9.0))
    run(where, trace_of((5, 12), (5, 12)), chosen=two_tokens(PipelineMode.PING_PONG), observer=records.append)
    overlapped = [record for record in records if record.overlap_us > 0]
    assert len(overlapped) >= 5
    for record in overlapped:
        size = record.num_tokens.size
        assert record.verify_us == 200 + 10 * int(record.frontier.num_rows.sum()) and size == 1
        assert record.propose_us in (50, 100)
        assert record.overlap_us == min(record.verify_us, record.propose_us)
        assert record.step_us == max(record.verify_us, record.propose_us) + 9


def test_an_arrival_waits_for_the_step_that_runs():
    outcome = run(world(certain(ALWAYS)), trace_of((5, 9), (1, 1), gap_s=1e-6), "none")
    waited_us = (outcome.answers[1].response_s[0] - outcome.answers[0].start_s) * 1e6 - 1
    # The step of the first prompt and its first token (no draft: it is plain decoding), and one in which both decode.
    assert waited_us == pytest.approx(140 + 110 + 120 - 1, abs=0.01)


def test_a_prompt_beside_a_verification_pays_for_its_rows_alone():
    records, where = list[StepRecord](), world(certain(ALWAYS))
    where = replace(where, costs=replace(where.costs, is_padded=False))
    run(where, trace_of((5, 40), (41, 9), gap_s=3e-4), observer=records.append)
    _, mixed = (record for record in records if record.num_mixed_rows)
    num_rows = int(mixed.frontier.num_rows.sum())
    assert mixed.num_mixed_rows == 40
    assert mixed.verify_us == 100 + 10 * (num_rows + 40), "the fixed part of a call once"


def test_an_idle_engine_waits_for_the_next_arrival():
    outcome = run(world(certain(ALWAYS)), trace_of((1, 1), (1, 1), gap_s=1.0), "none")
    assert makespan_us(outcome) == pytest.approx(1e6 + 110, abs=0.01)


def lengths(count: int, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(1, 200, count), rng.integers(1, 90, count)
    return Trace(np.cumsum(rng.exponential(2e-3, count)), prompts, outputs, "made up")


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "fixed:1"}, {"policy": "fixed:6"}, {"policy": "survival"}, {"policy": "gp-lcb"}, {"policy": "faser"},
        {"pipeline": "ping_pong"}, {"pipeline": "run_ahead"}, {"early_exit": "on"}, {"max_num_seqs": 2},
        {"num_kv_blocks": 40}, {"max_prefill_tokens": 7},  # the former preempts
    ],
    ids=str,
)  # fmt: skip
def test_the_texts_do_not_depend_on_the_policy_or_how_they_are_scheduled(options):
    trace = lengths(30, 2)
    outcome = run(world(exits=1), trace, **{"policy": "fixed:4"} | options)
    assert tokens_of(outcome) == tokens_of(run(world(exits=1), trace, "none"))
    assert [len(tokens) for tokens in tokens_of(outcome)] == trace.num_output_tokens.tolist()
    summary = outcome.summary()
    if "policy" not in options:
        assert ("pipeline" in options) == (summary["overlap_share"] > 0)
        assert ("early_exit" in options) == (summary["pruned_share"] > 0)
        assert ("num_kv_blocks" in options) == (summary["num_preemptions"] > 0)


def test_what_no_path_of_outcomes_stands_for_is_refused():
    with pytest.raises(ConfigError, match="rejection"):
        run(world(), trace_of((5, 9)), acceptance="rejection")
