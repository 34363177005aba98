"""Drafts that clients bring along: tokens are those of plain decoding whatever they guess; right guesses save steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.decision import PipelineMode
from faser_backend.core.errors import RequestError
from faser_backend.core.frontier import MAIN
from faser_backend.core.record import StepRecord
from faser_backend.core.request import FinishReason, Request
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline import step
from faser_backend.pipeline.commit import RoundCounts, commit_tokens
from faser_backend.policy.registry import policy_usages
from tests.forced_engine import LANES, Case, agrees, open_forced
from tests.forcing import ADMITS_NOTHING, always, by_parity, calibrated, forced, outside_top, random_everything
from tests.harness import FakeEngine, drive, fake_engine, open_fake, request
from tests.test_engine import alone, random_requests

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode
# Trees run in turn alone.
POLICIES = [{"fixed": "fixed:4"}.get(name, name) for name in policy_usages() if name != "tree"]
VOCAB = 24
GUESSES = ("right", "wrong", "partly right", "too long", "none", "one token", "by chance")


def guess(kind: str, answer: list[int], vocab_size: int, rng: np.random.Generator) -> tuple[int, ...]:
    wrong = [(token + 1) % vocab_size for token in answer]
    half = len(answer) // 2
    return tuple(
        {
            "right": answer,
            "wrong": wrong,
            "partly right": answer[:half] + wrong[half : half + 1] + answer[half + 1 :],
            "too long": answer + wrong * 3,
            "none": [],
            "one token": answer[:1],
            "by chance": rng.integers(vocab_size, size=int(rng.integers(1, 30))).tolist(),
        }[kind]
    )


def guessing(requests: list[Request], expected: dict[str, list[int]], seed: int, vocab_size: int = VOCAB) -> Case:
    """Every request with a guess of its own."""
    rng = np.random.default_rng(seed)
    drafted = [
        replace(r, draft_ids=guess(GUESSES[int(rng.integers(len(GUESSES)))], expected[r.request_id], vocab_size, rng))
        for r in requests
    ]
    return Case(drafted, expected)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    many = [random_requests(seed, 14) for seed in range(2)]
    return [guessing(requests, alone(requests), seed) for seed, requests in enumerate(many)]


class Watcher:
    """Checks every step: clients' chains come whole, once, and in the first verification of their requests."""

    def __init__(self, fake: FakeEngine) -> None:
        self.num_chains = self.num_mixed = 0
        self._seen: set[Sequence] = set()
        fake.stepper.observers.append(self.observe)

    def observe(self, record: StepRecord) -> None:
        frontier = record.frontier
        if not record.has_clients:
            self._seen.update(record.plan.decodes)
            return
        assert (frontier.num_rows == frontier.num_drafted + 1)[frontier.is_client].all(), "a client's token was trimmed"
        for row, sequence in enumerate(record.plan.decodes):
            if frontier.is_client[row]:
                assert sequence not in self._seen and sequence not in record.plan.drafts
                drafted = frontier.drafted[row, : frontier.num_drafted[row]].tolist()
                assert tuple(drafted) == sequence.request.draft_ids[: len(drafted)]
                self.num_chains += 1
            self._seen.add(sequence)
        self.num_mixed += bool((frontier.num_drafted[~frontier.is_client] > 0).any())


# -- tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", PipelineMode)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_in_every_mode(cases: list[Case], policy: str, mode: PipelineMode):
    for seed, num_blocks in enumerate([200, 26]):
        fake = open_forced(policy, forced(mode), num_blocks=num_blocks)
        watcher = Watcher(fake)
        agrees(fake, cases[seed], seed)
        assert watcher.num_chains > 0
        assert watcher.num_mixed > 0 or policy != "fixed:4"


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("num_blocks", [200, 40, 26])
@pytest.mark.parametrize("seed", range(3))
def test_everything_may_change_at_every_step(cases: list[Case], lanes: str, num_blocks: int, seed: int):
    fake = open_forced("fixed:4", random_everything(seed), LANES[lanes](), num_blocks=num_blocks)
    watcher = Watcher(fake)
    agrees(fake, cases[seed % len(cases)], seed)
    assert watcher.num_chains > 0


@pytest.mark.parametrize("mode", PipelineMode)
@pytest.mark.parametrize(
    "pruner", [always(), by_parity(), outside_top(num_candidates=8), calibrated(0.6, segments=(0, 1))]
)
def test_early_exit_and_trimming(cases: list[Case], pruner, mode: PipelineMode):
    for trim in (None, ADMITS_NOTHING):
        fake = open_forced("fixed:4", forced(mode, pruner=pruner, trim=trim))
        Watcher(fake)
        agrees(fake, cases[0], None)
        assert fake.engine.metrics().num_pruned > 0 or trim is not None


@pytest.mark.parametrize("mode", PipelineMode)
def test_n_grams_draft_the_rest(cases: list[Case], mode: PipelineMode):
    for num_blocks in (200, 26):
        fake = open_forced("fixed:4", forced(mode), has_ngrams=True, num_blocks=num_blocks)
        watcher = Watcher(fake)
        agrees(fake, cases[1], 2)
        assert watcher.num_chains > 0


@pytest.mark.parametrize("mode", PipelineMode)
def test_cancellation(cases: list[Case], mode: PipelineMode):
    requests, expected = cases[1].requests, cases[1].expected
    fake = open_forced("fixed:4", forced(mode), num_blocks=40)
    for r in requests[:4]:  # before they have emitted anything, whatever is in flight of them
        fake.engine.submit(replace(r, request_id="early " + r.request_id))
    for _ in range(3):
        fake.engine.step()
    for r in requests[:4]:
        fake.engine.cancel("early " + r.request_id)
    while fake.engine.has_work:
        fake.engine.step()
    result = drive(fake.engine, requests, seed=2, cancel={r.request_id: i % 3 for i, r in enumerate(requests) if i % 2})
    for r in requests:
        tokens = result.tokens[r.request_id]
        is_cut = result.final[r.request_id].finish_reason is FinishReason.CANCELLED
        assert tokens == expected[r.request_id][: len(tokens) if is_cut else None]


def test_a_draft_that_counts_guesses_as_read_is_found(cases: list[Case], monkeypatch: pytest.MonkeyPatch):
    """The control: were draft_len advanced over a client's tokens, the draft would read K/V that nobody wrote."""

    def careless(sequence: Sequence, tokens: list[int], counts: RoundCounts) -> FinishReason | None:
        return commit_tokens(sequence, tokens, counts._replace(source=MAIN))

    monkeypatch.setattr(step, "commit_tokens", careless)
    result = drive(open_forced("fixed:4", forced(SERIAL)).engine, cases[0].requests, seed=0, check=False)
    assert any("stale K/V counts as known" in str(output.error) for output in result.final.values())


def test_reused_prefixes_hold_what_the_draft_has_read():
    """Blocks full of guessed tokens are reused with the draft's K/V, which check_kv looks at."""
    prompt = list(range(20)) * 2
    first = request("first", prompt, 30)
    answer = alone([first])["first"]
    again = [replace(request(f"again {i}", prompt + answer[: 9 * i], 12), draft_ids=(3, 4)) for i in range(3)]
    case = Case([replace(first, draft_ids=tuple(answer))], {"first": answer})
    for policy in ("none", "fixed:4"):
        fake = open_forced(policy, forced(SERIAL))
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
