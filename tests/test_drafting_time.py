"""What a step record calls drafting: the draft phases of steps that verified nothing, and no reading of prompts."""

from __future__ import annotations

import pytest

from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import PipelineMode
from faser_backend.core.record import StepRecord
from tests.fakes import CountingClock, HashRunner
from tests.forced_engine import open_forced
from tests.forcing import forced
from tests.harness import FakeEngine, drive, open_fake, request

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode
CALL_US, PROMPT_US = 1000, 1_000_000


def slow_down(fake: FakeEngine) -> None:
    """Every call takes CALL_US of the engine's virtual clock, one that wants no logits PROMPT_US."""
    clock = fake.stepper.clock
    assert isinstance(clock, CountingClock)

    def timed(runner: HashRunner) -> None:
        run = runner.run_segment

        def run_segment(segment: int, rows: RowBatch, hidden):
            clock._now += 1000 * (CALL_US if rows.logit_rows.size else PROMPT_US)
            return run(segment, rows, hidden)

        runner.run_segment = run_segment  # type: ignore[method-assign]

    for runner in (*fake.targets, *fake.drafts):
        timed(runner)


def records_of(fake: FakeEngine) -> list[StepRecord]:
    """Of requests whose prompts take some steps to be read, and arrive while others decode."""
    records: list[StepRecord] = []
    slow_down(fake)
    fake.stepper.observers.append(records.append)
    drive(fake.engine, [request(f"r{i}", [1 + i] * 40, 12) for i in range(5)], seed=3)
    return records


@pytest.mark.parametrize("policy", ["none", "fixed:3"])
def test_serial_steps_never_only_draft(policy: str):
    """Steps that read nothing but prompts were counted once, 9.8 ms of them under `none`."""
    records = records_of(open_fake(policy))
    assert len(records) > 10 and all(record.drafting_us == 0.0 for record in records)
    assert any(record.prefill_us > PROMPT_US for record in records)


@pytest.mark.parametrize("mode", [RUN_AHEAD, PING_PONG])
@pytest.mark.parametrize("prefills_draft", [True, False])
def test_steps_that_only_draft_count_what_they_draft(mode: PipelineMode, prefills_draft: bool):
    """Three calls of a chain each, whatever is read beside it: also by the draft, which catches up."""
    records = records_of(open_forced("fixed:3", forced(mode, prefills_draft=prefills_draft)))
    drafting = [record.drafting_us for record in records if record.drafting_us]
    assert drafting and all(CALL_US <= us < 20 * CALL_US for us in drafting)
    assert min(drafting) < 4 * CALL_US
