"""The scheduler's decisions as data: order, budgets, admission and preemption."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest

from faser_backend.core.errors import ConfigError
from faser_backend.core.plan import InFlight
from faser_backend.core.sequence import Sequence
from faser_backend.policy.block_manager import BlockManager
from faser_backend.policy.registry import parse_policy
from faser_backend.policy.scheduler import FIRST_ROWS, PREFILL_HORIZON_STEPS, Scheduler
from tests.support.harness import guessed, request, step_record


def scheduler(
    num_blocks: int = 20, policy: str = "fixed:4", *, budget: int = 16, never_evicts: bool = False, context: int = 40
) -> Scheduler:
    blocks = BlockManager(num_blocks, 4, 4, context)
    return Scheduler(
        blocks, parse_policy(policy, guessed), max_num_seqs=4, max_prefill_tokens=budget, never_evicts=never_evicts
    )


def sequence(name: str, num_prompt: int, max_tokens: int = 8, **options) -> Sequence:
    prompt = [(hash(name) + i) % 1000 for i in range(num_prompt)]
    return Sequence.from_request(request(name, prompt, max_tokens, **options), 0)


def run(plan, num_emitted: int = 1) -> None:
    """Carries a plan out as the pipeline would."""
    for chunk in plan.prefills:
        chunk.sequence.target_len = chunk.start + chunk.num_tokens
    for chunk in plan.draft_prefills:
        assert chunk.start == chunk.sequence.draft_len
        chunk.sequence.draft_len = chunk.start + chunk.num_tokens
    for seq in plan.decodes:
        seq.append([1] * min(num_emitted, seq.num_remaining_tokens))
        seq.target_len = seq.num_tokens - 1


def chunk_sizes(
    sched: Scheduler, plain_us: float, row_us: float, *, max_gap_ms: float, num_steps: int
) -> Iterator[int]:
    """Yields the prompt rows of steps beside a request that decodes, on a machine of linear times. They are learned."""
    sched.max_gap_ms = max_gap_ms
    while num_steps:
        plan = sched.schedule(InFlight.empty())
        run(plan)
        if not plan.decodes:
            continue
        num_steps -= 1
        num_rows = sum(chunk.num_tokens for chunk in plan.prefills)
        record = step_record(plan.decodes, [1], [0], us=plain_us + row_us * num_rows)
        sched.observe(replace(record, plan=plan))
        yield num_rows


def reading(**options) -> Scheduler:
    """Returns a scheduler with a request that decodes and a long prompt."""
    sched = scheduler(20_000, budget=256, context=40_000, **options)
    sched.add(sequence("decodes", 1, 3_000, max_draft_tokens=0))
    run(sched.schedule(InFlight.empty()))
    sched.add(sequence("prompt", 36_000, 1))
    return sched


@pytest.mark.parametrize(("plain_us", "row_us"), [(1000.0, 50.0), (8000.0, 10.0), (9500.0, 100.0), (20000.0, 5.0)])
def test_prompts_keep_gaps_at_the_limit(plain_us: float, row_us: float):
    """But advance by a block at least."""
    first, *sizes = chunk_sizes(reading(), plain_us, row_us, max_gap_ms=10.0, num_steps=100)
    expected = min(max((10_000.0 - plain_us) / row_us, 4), 256)
    assert first == FIRST_ROWS
    assert sizes[-1] == pytest.approx(expected, rel=0.15, abs=1)


def test_after_other_times_prompts_are_read_at_full_speed_again():
    """A stall or a slow batch is not remembered, though no step is without prompts."""
    sched = reading()
    assert list(chunk_sizes(sched, 30_000.0, 50.0, max_gap_ms=10.0, num_steps=30))[-1] == 4
    sizes = list(chunk_sizes(sched, 1_000.0, 50.0, max_gap_ms=10.0, num_steps=12))
    assert sizes[-1] == pytest.approx(180, abs=5)


def test_without_a_limit_steps_read_what_they_may():
    assert set(chunk_sizes(reading(), 30_000.0, 50.0, max_gap_ms=0.0, num_steps=9)) == {256}


def test_nobody_waits_where_only_prompts_are_read():
    sched = scheduler(2_000, budget=256, context=4_000)
    sched.max_gap_ms = 0.001
    sched.add(sequence("prompt", 2_000, 1))
    assert [chunk.num_tokens for chunk in sched.schedule(InFlight.empty()).prefills] == [256]


def test_prefill_is_chunked_beside_decodes():
    sched = scheduler()
    first, second = sequence("a", 5), sequence("b", 36, 4)
    sched.add(first)
    run(sched.schedule(InFlight.empty()))
    sched.add(second)
    chunks = []
    for _ in range(3):
        plan = sched.schedule(InFlight.empty())
        assert plan.decodes == [first, second][: 1 + (len(chunks) == 2)], "its end gives the first token"
        chunks += [(chunk.start, chunk.num_tokens) for chunk in plan.prefills]
        run(plan)
    assert chunks == [(0, 16), (16, 16), (32, 3)]
    assert second.is_ready


def test_short_prompts_are_read_first_but_not_for_ever():
    sched = scheduler(2_000, budget=16, context=4_000)
    long, num_steps, first_steps = sequence("long", 101, 1), 0, []
    sched.add(long)
    while not long.is_ready:
        num_steps += 1
        if num_steps > 1:
            sched.add(sequence(f"short {num_steps}", 9, 1))
        plan = sched.schedule(InFlight.empty())
        first_steps.append(plan.prefills[0].sequence is long)
        run(plan, 0)
        for ended in [each for each in sched.running if each.is_ready and each is not long]:
            sched.remove(ended)
    assert first_steps == [True] + 10 * [False] + 6 * [True], "alone it takes 7 steps"


def test_a_prompt_that_ends_waits_for_no_other_unless_few_tokens_are_read():
    sched = scheduler(2_000, budget=16, context=4_000)
    for name, length in (("a", 3), ("b", 3), ("c", 3), ("d", 5)):
        sched.add(sequence(name, length, 1))
    for expected in ([2, 2], [2, 4], []):
        plan = sched.schedule(InFlight.empty())
        assert [chunk.num_tokens for chunk in plan.prefills] == expected
        run(plan, 0)


def test_a_draft_that_lags_is_caught_up_within_the_budget_before_it_drafts():
    sched = scheduler(budget=16)
    first, second = sequence("a", 36, 4), sequence("b", 12, 12)
    sched.add(first)
    sched.add(second)
    while not (first.is_ready and second.is_ready):
        plan = sched.schedule(InFlight.empty())
        run(plan, 0)
    first.target_len, second.target_len = first.num_tokens - 1, second.num_tokens - 1
    first.draft_len, second.draft_len = 0, 6
    caught_up, drafting = [], []
    for _ in range(4):
        plan = sched.schedule(InFlight.empty())
        assert plan.decodes == [first, second], "catching up keeps nobody from decoding"
        caught_up.append([(chunk.sequence, chunk.start, chunk.num_tokens) for chunk in plan.draft_prefills])
        drafting.append([seq for seq, length in zip(plan.decodes, plan.num_draft_tokens, strict=True) if length])
        run(plan, 0)
    assert caught_up == [[(first, 0, 16)], [(first, 16, 16)], [(second, 6, 5)], []]
    assert drafting == [[], [], [first, second], [first, second]]


def test_policies_hear_of_sequences_whose_prompts_are_nearly_read():
    scheduled = scheduler(num_blocks=40, budget=1)
    told: list[tuple[int, int]] = []
    decide = scheduled.policy.decide

    def listen(sequences, num_prefilling: int = 0):
        told.append((len(sequences), num_prefilling))
        return decide(sequences, num_prefilling)

    scheduled.policy.decide = listen  # type: ignore[method-assign]
    for name, num_prompt in (("first", 2), ("near", 20), ("far", PREFILL_HORIZON_STEPS - 17)):
        scheduled.add(sequence(name, num_prompt))
    run(scheduled.schedule(InFlight.empty()))  # reads the first prompt
    run(scheduled.schedule(InFlight.empty()))
    scheduled.add(sequence("last", 3))
    assert told == [(1, 1)], "both prompts together take one step more than is looked ahead"
    run(scheduled.schedule(InFlight.empty()))
    assert told[1:] == [(1, 2)], "a step later they do not; who waits is not counted"


def test_one_token_prompt_needs_no_prefill():
    sched = scheduler()
    seq = sequence("a", 1)
    sched.add(seq)
    plan = sched.schedule(InFlight.empty())
    assert plan.admitted == [seq] and plan.prefills == []
    assert sched.schedule(InFlight.empty()).decodes == [seq]


def test_lengths_are_clipped_to_the_request_and_an_adapters_rows_lie_side_by_side():
    sched, lora = scheduler(policy="fixed:8"), {"lora_name": "adapter"}
    full, capped, ending = sequence("a", 1, 20, **lora), sequence("b", 1, 20, max_draft_tokens=2), sequence("c", 1, 3)
    full.adapter = object()
    for seq in (full, capped, ending):
        sched.add(seq)
    sched.schedule(InFlight.empty())
    plan = sched.schedule(InFlight.empty())
    lengths = list(zip([s.request.request_id for s in plan.decodes], plan.num_draft_tokens, strict=True))
    assert lengths == [("b", 2), ("c", 2), ("a", 8)]


def test_drafts_are_given_up_before_anyone_is_preempted():
    sched = scheduler(num_blocks=10)
    sched.add(sequence("a", 38, 2))
    for _ in range(3):
        run(sched.schedule(InFlight.empty()))
    plan = sched.schedule(InFlight.empty())
    assert len(plan.decodes) == 1 and not plan.preempted


def test_the_newest_is_preempted_and_returns_first():
    sched = scheduler(num_blocks=10, policy="none")
    old, new, late = sequence("old", 16, 24), sequence("new", 16, 24), sequence("late", 30, 8)
    for seq in (old, new, late):
        sched.add(seq)
    preempted = []
    while not preempted:
        plan = sched.schedule(InFlight.empty())
        preempted = [seq for seq, _ in plan.preempted]
        sched.check_integrity()
        run(plan)
    assert preempted == [new]
    assert list(sched.waiting) == [new, late]
    assert new.target_len == 0 and new.stats.num_preemptions == 1


def test_a_prefix_is_hashed_once_however_long_its_request_waits(monkeypatch: pytest.MonkeyPatch):
    hashed = MagicMock(wraps=hashlib.blake2b)
    monkeypatch.setattr(hashlib, "blake2b", hashed)
    sched = scheduler(policy="none", context=80)
    first, waits = sequence("first", 40, 20), sequence("waits", 76, 4)
    waits.token_ids[:40] = first.token_ids[:40]
    for seq in (first, waits):
        sched.add(seq)
    while not first.is_ready:
        plan = sched.schedule(InFlight.empty())
        run(plan)
        sched.blocks.publish(first.slot, first.token_ids, first.target_len, 0)
    hashed.reset_mock()
    for _ in range(9):
        run(sched.schedule(InFlight.empty()))
    assert list(sched.waiting) == [waits] and hashed.call_count <= 10


def test_removal_gives_back_everything_at_once():
    sched = scheduler()
    running, waiting = sequence("a", 20), sequence("b", 40)
    sched.add(running)
    sched.schedule(InFlight.empty())
    sched.add(waiting)
    sched.remove(waiting)
    sched.remove(running)
    sched.check_integrity()
    assert sched.blocks.num_free_blocks == sched.blocks.num_blocks


@pytest.mark.parametrize("never_evicts", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_random_load_always_finishes(seed: int, never_evicts: bool):
    rng = np.random.default_rng(seed)
    sched = scheduler(num_blocks=12, budget=8, never_evicts=never_evicts)
    everyone = [sequence(f"s{i}", int(rng.integers(1, 30)), int(rng.integers(1, 11))) for i in range(20)]
    pending, num_steps = list(everyone), 0
    while pending or sched.waiting or sched.running:
        if pending and rng.random() < 0.5:
            sched.add(pending.pop())
        plan = sched.schedule(InFlight.empty())
        sched.check_integrity()
        assert sum(chunk.num_tokens for chunk in plan.prefills) <= 8
        assert not (never_evicts and plan.preempted)
        run(plan, int(rng.integers(1, 6)))
        for seq in list(sched.running):
            if seq.num_remaining_tokens == 0 or rng.random() < 0.02:
                sched.remove(seq)
        num_steps += 1
        assert num_steps < 2000, "the scheduler is stuck"


SPECS = "fixed fixed:0 fixed:33 fixed:x fixed:-1 none:3 eagle fixed:² goodput:2 schedule schedule:4:4"


@pytest.mark.parametrize("spec", ["", *SPECS.split()])
def test_unknown_policies_are_refused_by_name(spec: str):
    with pytest.raises(ConfigError, match="policy"):
        parse_policy(spec, guessed)
