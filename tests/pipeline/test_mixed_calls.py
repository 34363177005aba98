"""Prompts that share the call of a verification: who may, what is counted, and that no token depends on it."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import PipelineMode
from faser_backend.core.plan import StepRecord
from faser_backend.core.request import FinishReason, Request
from faser_backend.pipeline import prefill, verify
from tests.pipeline.test_engine import alone, random_requests
from tests.pipeline.test_isolation import ParityGrammar
from tests.support.fakes import HashRunner
from tests.support.forced_engine import POLICIES, open_forced
from tests.support.forcing import always, forced, random_lengths
from tests.support.harness import BLOCK, FakeEngine, drive, fake_engine, open_fake, request

SERIAL = PipelineMode.SERIAL


def requests_of(seed: int) -> list[Request]:
    """Every third has a grammar."""
    made = random_requests(seed, 9)
    for index in range(0, 9, 3):
        made[index] = replace(made[index], sampling=replace(made[index].sampling, grammar=ParityGrammar()))
    return made


def records_of(fake: FakeEngine) -> list[StepRecord]:
    seen: list[StepRecord] = []
    fake.step_runner.observers.append(seen.append)
    return seen


@pytest.mark.parametrize("options", [{}, {"num_blocks": 26}, {"has_both": True}], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_plain_decoding(policy: str, options: dict):
    fake = open_forced(policy, forced(SERIAL), **options)
    seen, requests = records_of(fake), requests_of(0)
    assert drive(fake.engine, requests, seed=0).tokens == alone(requests)
    assert sum(record.num_mixed_rows for record in seen) > 0
    assert fake.engine.metrics().num_reused_blocks > 0


@pytest.mark.parametrize("uses_rejection", [False, True])
@pytest.mark.parametrize("num_blocks", [24, 200])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_separate_calls(seed: int, num_blocks: int, uses_rejection: bool):
    """By either rule, if lengths are the same; log-probabilities too."""
    found, requests = [], requests_of(seed)
    for most in (None, 0):
        change = random_lengths(seed, SERIAL)
        fake = open_forced("fixed:4", change, num_blocks=num_blocks, uses_rejection=uses_rejection)
        for target in fake.targets:
            target.max_mixed_rows = most
        seen = records_of(fake)
        result = drive(fake.engine, requests, seed=seed)
        assert (sum(record.num_mixed_rows for record in seen) > 0) == (most is None)
        assert (fake.engine.metrics().num_preemptions > 0) == (num_blocks < 200)
        found.append((result.tokens, result.log_probs))
    assert found[0] == found[1]


class Swayed(HashRunner):
    """Negative control: logits depend on whether other rows without logits are in the call."""

    def logits_after(self, tokens: np.ndarray) -> np.ndarray:
        return np.roll(super().logits_after(tokens), self.is_mixed)

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        self.is_mixed = 0 < rows.logit_rows.size < rows.num_rows
        return super().run_segment(segment, rows, hidden)


@pytest.mark.parametrize("fault", ["swayed", "left out", "misplaced"])
def test_faults_of_such_calls_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch):
    mixed_rows = verify.mixed_rows

    def misplaced(rows: RowBatch, prompts: RowBatch) -> RowBatch:
        return mixed_rows(rows, replace(prompts, context_lens=prompts.context_lens + 1))

    if fault == "left out":
        monkeypatch.setattr(verify, "mixed_rows", lambda rows, prompts: rows)
    if fault == "misplaced":
        monkeypatch.setattr(verify, "mixed_rows", misplaced)
    requests = random_requests(0, 9)
    fake = open_fake("fixed:2")
    if fault == "swayed":
        fake.targets[0].__class__ = Swayed
    with nullcontext() if fault == "swayed" else pytest.raises(AssertionError, match="never written is read"):
        assert drive(fake.engine, requests, seed=0, check=False).tokens != alone(requests)


@pytest.mark.parametrize("mode", list(PipelineMode))
def test_a_prompt_gives_a_token_in_the_step_that_ends_it(mode: PipelineMode, monkeypatch: pytest.MonkeyPatch):
    """A client's draft is verified in the next one. Policies learn from steps that they decided about."""
    fake = open_forced("fixed:3", forced(mode))
    seen, learned, is_first = records_of(fake), list[StepRecord](), []
    monkeypatch.setattr(fake.step_runner.scheduler.policy, "observe", learned.append)
    shared = [2] * (2 * BLOCK + 1)
    prompts = {"new": [1] * 9, "beside": shared, "reused": shared, "short": [3], "drafted": [4] * 5}
    for name, prompt in prompts.items():
        fake.engine.submit(request(name, prompt, 30, draft_ids=(1, 2) if name == "drafted" else ()))
        is_first.append(name in {output.request_id for output in fake.engine.step()})
    assert is_first == [True, True, True, True, False] and fake.engine.metrics().num_reused_blocks == 2
    assert learned == seen[1:], "who is read alone was not decided about"


@pytest.mark.parametrize("mode", list(PipelineMode))
@pytest.mark.parametrize("has_pruner", [False, True])
def test_serial_steps_share_a_call_that_takes_no_exit(mode: PipelineMode, has_pruner: bool):
    fake = open_forced("fixed:3", forced(mode, pruner=always() if has_pruner else None))
    seen = records_of(fake)
    drive(fake.engine, random_requests(0, 9), seed=0)
    reading = [record for record in seen if record.plan.prefills]
    mixed = [record for record in reading if record.num_mixed_rows and record.plan.decision.num_draft_tokens]
    assert reading and bool(mixed) == (mode is SERIAL)
    for record in mixed:
        assert (record.frontier.num_rows == record.verification.num_kept).all()
        assert record.num_mixed_rows == sum(chunk.num_tokens for chunk in record.plan.prefills)


def test_calls_stay_within_what_a_runtime_holds():
    fake = open_fake("fixed:2", max_prefill_tokens=24)
    fake.targets[0].max_mixed_rows = 20
    seen, sizes = records_of(fake), []
    run = fake.targets[0].run_segment

    def watched(segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        if 0 < rows.logit_rows.size < rows.num_rows:
            sizes.append(rows.num_rows)
        return run(segment, rows, hidden)

    fake.targets[0].run_segment = watched  # type: ignore[method-assign]
    drive(fake.engine, random_requests(0, 9), seed=0)
    assert sizes and max(sizes) <= 20
    assert any(record.plan.prefills and not record.num_mixed_rows for record in seen)


def test_wanted_logits_and_failures_of_a_prompt_touch_nobody_else(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    requests = [request(f"r{i}", [*range(20), i], 20) for i in range(4)]
    expected = alone(requests)
    wanting = request("wanting", [3] * 40, 4, wants_context_logits=True)
    monkeypatch.setattr(prefill, "_keep", fails)
    engine, _ = fake_engine("fixed:2", max_prefill_tokens=8)
    found = drive(engine, [*requests[:2], wanting, *requests[2:]], seed=3)
    assert found.final["wanting"].finish_reason is FinishReason.ERROR
    assert {name: found.tokens[name] for name in expected} == expected
