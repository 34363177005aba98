"""Drafts that clients bring along: tokens are those of plain decoding whatever they guess; right guesses save steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from faser_backend.core.errors import RequestError
from faser_backend.core.record import StepRecord
from faser_backend.core.request import FinishReason
from tests.forced_engine import Case, agrees, open_forced
from tests.forcing import forced
from tests.harness import VOCAB, drive, fake_engine, open_fake, request
from tests.test_engine import alone


def test_reused_prefixes_hold_what_the_draft_has_read():
    """Blocks full of guessed tokens are reused with the draft's K/V, which check_kv looks at."""
    prompt = list(range(20)) * 2
    first = request("first", prompt, 30)
    answer = alone([first])["first"]
    again = [replace(request(f"again {i}", prompt + answer[: 9 * i], 12), draft_ids=(3, 4)) for i in range(3)]
    case = Case([replace(first, draft_ids=tuple(answer))], {"first": answer})
    for policy in ("none", "fixed:4"):
        fake = open_forced(policy, forced())
        agrees(fake, case, None)
        agrees(fake, Case(again, alone(again)), None)
        assert fake.engine.metrics().num_reused_blocks > 20


# -- what is counted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "fixed:4", "faser"])
def test_a_right_guess_is_one_step(policy: str):
    requests = [request(f"r{i}", [1, 2, 3 + i], 20) for i in range(3)]
    expected = alone(requests)
    engine, _ = fake_engine(policy)
    result = drive(engine, [replace(r, draft_ids=tuple(expected[r.request_id]) * 2) for r in requests])
    assert result.tokens == expected
    for output in result.final.values():
        stats = output.stats
        assert stats is not None
        assert (stats.num_steps, stats.num_drafted, stats.num_tested, stats.num_accepted) == (1, 19, 19, 19)
    metrics = engine.metrics()
    assert metrics.num_drafted == metrics.num_accepted == 3 * 19


def test_a_guess_is_tested_up_to_its_first_mistake():
    r = request("r", [1, 2, 3], 20)
    answer = alone([r])["r"]
    engine, _ = fake_engine("none")
    draft = (*answer[:5], (answer[5] + 1) % VOCAB, *answer[6:9])
    stats = drive(engine, [replace(r, draft_ids=draft)]).final["r"].stats
    assert stats is not None and (stats.num_drafted, stats.num_tested, stats.num_accepted) == (9, 6, 5)
    assert stats.num_steps == 20 - 5


@pytest.mark.parametrize("options", [{"max_draft_tokens": 0}, {"max_tokens": 1}])
def test_where_there_is_no_room_guesses_are_ignored(options: dict[str, int]):
    r = request("r", [1, 2, 3], options.pop("max_tokens", 8), draft_ids=(1, 2, 3, 4), **options)
    engine, _ = fake_engine("fixed:4")
    result = drive(engine, [r])
    assert result.tokens == alone([r])
    stats = result.final["r"].stats
    assert stats is not None and stats.num_drafted == 0


def test_a_stop_within_the_guess_ends_the_request():
    r = request("r", [1, 2, 3], 20)
    answer = alone([r])["r"]
    stop = answer[6]
    expected = answer[: answer.index(stop) + 1]
    engine, _ = fake_engine("none")
    result = drive(engine, [replace(r, draft_ids=tuple(answer), end_ids=(stop,))])
    assert result.tokens["r"] == expected and result.final["r"].finish_reason is FinishReason.END_ID


def test_compiled_engines_get_no_more_rows_than_they_take():
    r = request("r", [1, 2, 3], 60)
    answer = alone([r])["r"]
    fake = open_fake("none")
    fake.targets[0].max_logit_rows = 16
    result = drive(fake.engine, [replace(r, draft_ids=tuple(answer))])
    stats = result.final["r"].stats
    assert result.tokens["r"] == answer
    assert stats is not None and stats.num_drafted == stats.num_accepted == 15


def test_long_guesses_share_what_a_step_may_read():
    requests = [request(f"r{i}", [1, 2, 3 + i], 90) for i in range(3)]
    expected = alone(requests)
    drafted = [replace(r, draft_ids=tuple(expected[r.request_id])) for r in requests]
    for budget, longest in ((16, 32), (150, 50), (1000, 89)):  # never less than a draft of the server's own may have
        engine, _ = fake_engine("none", max_prefill_tokens=budget)
        result = drive(engine, drafted)
        assert result.tokens == expected
        assert {output.stats.num_drafted for output in result.final.values() if output.stats} == {longest}


def test_a_guess_makes_nobody_go():
    requests = [request(f"r{i}", [i] * 9, 20) for i in range(4)]  # 3 blocks each, and one to spare
    expected = alone(requests)
    drafted = [replace(r, draft_ids=tuple(expected[r.request_id])) for r in requests]
    fake = open_fake("none", num_blocks=26, max_prefill_tokens=200)
    preempted = []

    def note(record: StepRecord) -> None:
        if record.has_clients:
            preempted.extend(record.plan.preempted)

    fake.stepper.observers.append(note)
    result = drive(fake.engine, drafted)
    assert result.tokens == expected and not preempted
    counts = [output.stats.num_drafted for output in result.final.values() if output.stats]
    assert 0 in counts and 19 in counts, "some guesses find room and some do not"


def test_token_ids_out_of_range_are_refused():
    engine, _ = fake_engine("none")
    for token_id in (-1, VOCAB):
        with pytest.raises(RequestError, match=rf"draft_input_ids = {token_id}: must lie in \[0, 23\]"):
            engine.submit(request("bad", [1, 2, 3], 8, draft_ids=(1, token_id)))
