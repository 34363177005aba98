"""Who drafts and who is verified in overlapped steps: balance, order, starvation, and blocks that run short."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.decision import PipelineMode
from faser_backend.core.frontier import Frontier
from faser_backend.core.plan import InFlight, StepPlan
from faser_backend.core.sequence import Sequence
from faser_backend.policy.block_manager import BlockManager
from faser_backend.policy.registry import parse_policy
from faser_backend.policy.scheduler import Scheduler
from tests.support.forcing import Change, Forced, alternating, forced, random_everything
from tests.support.harness import guessed, request, step_record

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode


def scheduler(change: Change, policy: str = "fixed:4", *, num_blocks: int = 200, max_num_seqs: int = 16) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, 4, max_num_seqs, 40, can_reuse=False),
        Forced(parse_policy(policy, guessed), change),
        max_num_seqs=max_num_seqs,
        max_prefill_tokens=1000,
        never_evicts=False,
    )


def sequences(count: int, num_prompt: int = 5, max_tokens: int = 30, **options) -> list[Sequence]:
    return [Sequence.from_request(request(str(i), [i] * num_prompt, max_tokens, **options), 0) for i in range(count)]


def started(sched: Scheduler, everyone: list[Sequence]) -> Scheduler:
    for sequence in everyone:
        sched.add(sequence)
    carry_out(sched, sched.schedule(InFlight.empty()))
    return sched


def carry_out(sched: Scheduler, plan: StepPlan, accepts: int = 2) -> InFlight:
    """Carries a plan out as the pipeline would: every verification accepts `accepts` drafts, so that of chains that
    ran ahead those live whose premise was no longer than this."""
    ready = dict(zip(plan.in_flight.sequences, plan.in_flight.frontier.num_drafted.tolist(), strict=True))
    for chunk in plan.prefills:
        chunk.sequence.target_len = chunk.start + chunk.num_tokens
    flying = {sequence: count for sequence, count in ready.items() if sequence not in plan.decodes}
    ahead = dict(zip(plan.drafts, plan.num_ahead_tokens, strict=True))
    for sequence, num_first in zip(plan.decodes, plan.num_draft_tokens, strict=True):
        tested = ready.get(sequence, num_first)
        runs_ahead = sequence in ahead
        num_emitted = min(tested, accepts) if runs_ahead and accepts >= tested else min(tested, accepts) + 1
        sequence.append([1] * min(num_emitted, sequence.num_remaining_tokens))
        sequence.target_len = sequence.num_tokens - 1
        if runs_ahead and accepts < tested:
            del ahead[sequence]
    flying |= ahead
    for sequence in plan.decodes:
        if sequence.num_remaining_tokens == 0:
            sched.remove(sequence)
            flying.pop(sequence, None)
        else:
            sched.blocks.truncate(sequence.slot, sequence.num_tokens + flying.get(sequence, 0))
    if not flying:
        return InFlight.empty()
    counts = np.array(list(flying.values()))
    return InFlight(list(flying), Frontier(np.zeros((counts.size, int(counts.max())), np.int64), counts))


@pytest.mark.parametrize("mode", [RUN_AHEAD, PING_PONG])
def test_the_first_overlapped_step_drafts_alone(mode: PipelineMode):
    everyone = sequences(3)
    sched = started(scheduler(forced(mode)), everyone)
    plan = sched.schedule(InFlight.empty())
    assert plan.drafts == everyone and plan.num_ahead_tokens == [4, 4, 4]
    assert plan.decodes == [] and not plan.is_empty


def test_running_ahead_verifies_and_drafts_the_same():
    everyone = sequences(3)
    sched = started(scheduler(forced(RUN_AHEAD)), everyone)
    in_flight = carry_out(sched, sched.schedule(InFlight.empty()))
    plan = sched.schedule(in_flight)
    assert plan.decodes == plan.drafts == everyone
    assert plan.num_draft_tokens == [0, 0, 0]
    for sequence in everyone:  # what flies and what is drafted behind it have their blocks
        assert sched.blocks.num_blocks_of(sequence.slot) == sched.blocks.num_blocks_for(sequence.num_tokens + 8)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 12])
def test_ping_pong_falls_into_two_cohorts(count: int):
    everyone = sequences(count)
    sched = started(scheduler(forced(PING_PONG)), everyone)
    in_flight, verified = InFlight.empty(), []
    for step in range(7):
        plan = sched.schedule(in_flight)
        assert not set(plan.decodes) & set(plan.drafts)
        if step >= 2:
            assert len(plan.decodes) in {count // 2, -(-count // 2)}
            assert len(plan.drafts) in {count // 2, -(-count // 2)}
        verified.append(set(plan.decodes))
        in_flight = carry_out(sched, plan)
        sched.check_integrity()
    assert all(not a & b for a, b in itertools.pairwise(verified[2:])), "cohorts take turns"
    assert verified[3] | verified[4] == set(everyone)


@pytest.mark.parametrize("mode", [RUN_AHEAD, PING_PONG])
def test_who_opts_out_decodes_in_every_step(mode: PipelineMode):
    loud, silent = sequences(4), sequences(2, max_draft_tokens=0)
    sched = started(scheduler(forced(mode)), [*loud[:2], *silent, *loud[2:]])
    in_flight = InFlight.empty()
    for _ in range(6):
        plan = sched.schedule(in_flight)
        assert set(silent) <= set(plan.decodes) and not set(silent) & set(plan.drafts)
        in_flight = carry_out(sched, plan)
    assert all(sequence.num_output_tokens == 1 + 6 for sequence in silent)


def test_lengths_ahead_leave_room_for_what_flies():
    (sequence,) = sequences(1, max_tokens=7)
    sched = started(scheduler(forced(RUN_AHEAD)), [sequence])
    in_flight = carry_out(sched, sched.schedule(InFlight.empty()))
    assert in_flight.frontier.num_drafted.tolist() == [4]
    plan = sched.schedule(in_flight)
    assert plan.num_ahead_tokens == [1]  # 7 - 1 behind the prompt - 4 in flight - the token that ends the round


@pytest.mark.parametrize(("mode", "num_rows"), [(SERIAL, 80), (RUN_AHEAD, 80), (PING_PONG, 40)])
def test_in_ping_pong_two_steps_of_prompts_make_a_gap(mode: PipelineMode, num_rows: int):
    sched = scheduler(forced(mode))
    started(sched, sequences(4))
    sched.max_gap_ms = 0.8
    for name in range(10):
        sched.add(Sequence.from_request(request(f"prompt {name}", [name] * 30, 2), 0))
    plan = sched.schedule(InFlight.empty())
    record = step_record(sequences(4), [1] * 4, [0] * 4, us=640.0)  # 10 a row
    sched.observe(replace(record, plan=plan))
    plan = sched.schedule(InFlight.empty())
    assert sum(chunk.num_tokens for chunk in plan.prefills) == num_rows


def test_a_mode_switch_verifies_what_flies():
    everyone = sequences(3)
    sched = started(scheduler(alternating(forced(PING_PONG), forced(PING_PONG), forced(SERIAL))), everyone)
    in_flight = carry_out(sched, sched.schedule(InFlight.empty()))
    in_flight = carry_out(sched, sched.schedule(in_flight))
    flying = set(in_flight.sequences)
    plan = sched.schedule(in_flight)
    assert plan.decodes == everyone and plan.drafts == []
    assert flying and plan.num_draft_tokens == [0 if s in flying else 4 for s in everyone]


def test_without_blocks_to_draft_ahead_it_decodes():
    """Drafting for later is given up before anybody is preempted, and never stops who flies."""
    (sequence,) = sequences(1, num_prompt=13, max_tokens=9)
    sched = started(scheduler(forced(RUN_AHEAD), "fixed:8", num_blocks=4), [sequence])
    plan = sched.schedule(InFlight.empty())  # 14 tokens + 7 drafts need 6 blocks of 4
    assert plan.drafts == [] and plan.decodes == [sequence] and plan.preempted == []
    (sequence,) = sequences(1, num_prompt=13, max_tokens=21)
    sched = started(scheduler(forced(RUN_AHEAD), "fixed:2", num_blocks=4), [sequence])
    in_flight = carry_out(sched, sched.schedule(InFlight.empty()))
    plan = sched.schedule(in_flight)  # the chain of 2 flies, the 2 behind it need a fifth block
    assert plan.decodes == [sequence] and plan.drafts == [] and plan.in_flight.sequences == [sequence]


def test_preemption_takes_the_chain_along():
    old, new = sequences(2, num_prompt=10, max_tokens=21)
    sched = started(scheduler(forced(RUN_AHEAD), "fixed:1", num_blocks=7), [old, new])
    in_flight = carry_out(sched, sched.schedule(InFlight.empty()))
    assert set(in_flight.sequences) == {old, new}
    for _ in range(20):
        plan = sched.schedule(in_flight)
        assert set(plan.in_flight.sequences) <= set(sched.running)
        assert not {sequence for sequence, _ in plan.preempted} & {*plan.decodes, *plan.drafts}
        if plan.preempted:
            break
        in_flight = carry_out(sched, plan)
    assert [sequence for sequence, _ in plan.preempted] == [new]
    assert new not in plan.in_flight.sequences and new.slot == -1


@pytest.mark.parametrize("seed", range(12))
def test_any_modes_finish_any_load(seed: int):
    rng = np.random.default_rng(seed)
    sched = scheduler(random_everything(seed), num_blocks=14, max_num_seqs=5)
    pending = [
        Sequence.from_request(request(str(i), [1] * int(rng.integers(1, 25)), int(rng.integers(1, 16))), 0)
        for i in range(15)
    ]
    in_flight, num_steps = InFlight.empty(), 0
    while pending or sched.waiting or sched.running:
        if pending and rng.random() < 0.5:
            sched.add(pending.pop())
        plan = sched.schedule(in_flight)
        assert set(plan.in_flight.sequences) <= set(sched.running)
        assert len(set(plan.decodes)) == len(plan.decodes) and len(set(plan.drafts)) == len(plan.drafts)
        in_flight = carry_out(sched, plan, int(rng.integers(0, 5)))
        sched.check_integrity()
        for sequence in list(sched.running):
            if rng.random() < 0.02:
                sched.remove(sequence)
        num_steps += 1
        assert num_steps < 2000, "the scheduler is stuck"
