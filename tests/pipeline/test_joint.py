"""Drafting by look-ups and a draft model: tokens of plain decoding, and the value of either source."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from faser_backend.core.decision import PipelineMode, TrimRule
from faser_backend.core.frontier import MAIN, NGRAM, Frontier
from faser_backend.core.plan import StepRecord
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.joint import JointProposer
from faser_backend.pipeline.trim import admit, admit_by_price
from faser_backend.policy.calibration import AcceptanceModel, DrafterChoice, MarginCurve
from faser_backend.policy.candidates import batch_means
from tests.pipeline.test_engine import alone, random_requests
from tests.support.forced_engine import Case, agrees, open_forced
from tests.support.forcing import forced
from tests.support.harness import drive, request, step_record


@pytest.fixture(scope="module")
def case() -> Case:
    requests = [*random_requests(0, 8), request("copies", [7, 8, 9, 10] * 4, 30)]
    return Case(requests, alone(requests))


@pytest.fixture
def takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every look-up that finds something."""
    monkeypatch.setattr(DrafterChoice, "takes_look_up", lambda self, found, *_: found.num_drafted > 0)


def test_both_sources_are_verified_and_counted(case: Case, takes_all: None):
    fake = open_forced("fixed:3", forced(PipelineMode.SERIAL), has_both=True)
    seen: list[StepRecord] = []
    fake.step_runner.observers.append(seen.append)
    agrees(fake, case, None)
    proposer = fake.step_runner.proposer
    assert isinstance(proposer, JointProposer)
    assert not proposer._guesses and not proposer.look_ups._indexes, "a sequence left and is remembered"
    metrics = fake.engine.metrics()
    drafted, accepted = metrics.num_drafted_by_source, metrics.num_accepted_by_source
    assert sum(drafted.values()) == metrics.num_drafted and sum(accepted.values()) == metrics.num_accepted
    assert drafted["model"] > drafted["ngram"] * 0.1 > 0 and drafted["client"] == 0
    looked_up = sum(int(record.frontier.num_drafted[~record.frontier.is_main].sum()) for record in seen)
    assert looked_up == drafted["ngram"]


def test_the_draft_makes_no_call_where_look_ups_draft(monkeypatch: pytest.MonkeyPatch):
    """And reads then what it has missed, in one call."""
    calls = {}
    for name, takes in (("look-ups", True), ("model", False)):
        monkeypatch.setattr(
            DrafterChoice, "takes_look_up", lambda self, found, *_, takes=takes: takes & (found.num_drafted > 0)
        )
        fake = open_forced("fixed:4", forced(PipelineMode.SERIAL), has_both=True, vocab_size=5)
        for runner in (*fake.targets, *fake.drafts):
            runner.memory, runner.known = 1, {}
        drive(fake.engine, [request("r", [1, 2, 3] * 4, 60)])
        calls[name] = fake.drafts[0].num_calls + fake.drafts[1].num_calls
    assert calls["look-ups"] < 0.3 * calls["model"]


# -- what a source is worth ------------------------------------------------------------------------------


def found_chain(num_agreeing: int, num_tokens: int = 4) -> Frontier:
    bins = np.minimum(num_agreeing - 1 + np.arange(num_tokens), 13)
    margins = MarginCurve.margin_knots[bins][None].astype(np.float32)
    counts = np.array([num_tokens])
    return Frontier(np.zeros((1, num_tokens), np.int64), counts, counts + 1, margins, sources=np.array([NGRAM]))


def taught(num_rounds: int = 60) -> DrafterChoice:
    """Look-ups are right from 5 agreeing tokens on, the draft three times in four."""
    choice = DrafterChoice()
    margins = found_chain(1, 14).margins
    assert margins is not None
    for index in range(num_rounds * 14):
        at = index % 14
        choice.observe(NGRAM, False, margins[0, at : at + 1], int(at >= 4), 1)
        choice.observe(MAIN, False, np.full(1, 2.0, np.float32), int(index % 4 > 0), 1)
    return choice


def test_the_chain_that_promises_more_is_taken():
    choice, greedy, four = taught(), np.zeros(1, np.bool_), np.array([4])
    assert not choice.takes_look_up(found_chain(1), four, greedy, None)[0]
    assert choice.takes_look_up(found_chain(9), four, greedy, None)[0]
    sampled = ~greedy
    fresh = DrafterChoice().takes_look_up(found_chain(9), four, greedy, None)
    assert (choice.takes_look_up(found_chain(9), four, sampled, None) == fresh).all(), (
        "of sampled requests nothing is known"
    )
    nothing = replace(found_chain(9), num_drafted=np.array([0]))
    assert not choice.takes_look_up(nothing, four, greedy, None)[0]


def test_a_draft_call_that_costs_more_than_it_brings_leaves_it_to_look_ups():
    choice, greedy, four = taught(), np.zeros(1, np.bool_), np.array([4])
    weak = found_chain(3, 2)
    assert not choice.takes_look_up(weak, four, greedy, rule(call_us=1.0))[0]
    assert choice.takes_look_up(weak, four, greedy, rule(call_us=900.0))[0]
    assert not choice.takes_look_up(weak, four, greedy, rule(call_us=900.0, row_price=2.0))[0], "no row is worth it"


def rule(call_us: float, row_price: float = 0.0) -> TrimRule:
    zeros = np.zeros(14)
    return TrimRule(zeros, zeros, zeros, np.zeros(1), np.zeros(9), np.array([0.0, call_us]), 0.001, row_price=row_price)


def in_steps_of_two(num_accepted: list[int]) -> StepRecord:
    """Two greedy requests, the draft model's chain and a look-up's, with the same margins."""
    margins = np.full((2, 5), 2.0, np.float32)
    sequences = [Sequence.from_request(request(str(b), [1, 2, 3], 300), 0) for b in range(2)]
    made = step_record(sequences, [5, 5], num_accepted, margins=margins)
    return replace(made, frontier=replace(made.frontier, sources=np.array([MAIN, NGRAM])))


def test_each_source_has_a_curve_of_its_own():
    acceptance = AcceptanceModel({})
    for _ in range(100):
        acceptance.observe(in_steps_of_two([5, 0]))
    main, look_up = (curve.chances(np.array([2.0]))[0] for curve in acceptance.curves)
    assert main > 0.9 and look_up < 0.4
    assert acceptance.shares == pytest.approx([0.5, 0.5], abs=0.02)
    assert len(AcceptanceModel({}).curves) == 1, "a drafter that is alone"


def test_rows_are_trimmed_by_their_own_sources_chances():
    """The same margins: the model's chain is worth its rows, the look-up's is not."""
    knots = MarginCurve.margin_knots
    logits = np.stack([np.full(14, 4.0), np.full(14, -4.0)])
    costs = {"verify_us": np.arange(20) * 10.0 + 50.0, "draft_us": np.zeros(3)}
    made = TrimRule(knots, logits, np.full(14, 1 / 14), np.zeros(1), **costs, tokens_per_us=0.02,
                    row_price=0.2)  # fmt: skip
    frontier, slots = in_steps_of_two([0, 0]).frontier, np.arange(2)
    for admitted in (admit(made, frontier, slots), admit_by_price(made, frontier, slots)):
        assert admitted.tolist() == [6, 1]
    alone = frontier.take(np.array([1]))
    assert admit(made, alone, slots[1:]).tolist() == [1]
    assert admit(made, replace(alone, sources=None), slots[1:]).tolist() == [6]


def test_look_ups_are_reckoned_with_rows_and_without_draft_calls():
    chains = batch_means(AcceptanceModel({}), np.zeros(1))
    mix = SimpleNamespace(curves=AcceptanceModel({}).curves * 2, shares=(0.25, 0.75))
    both = batch_means(mix, np.zeros(1))
    np.testing.assert_allclose(both.drafting, 0.25 * chains.drafting)
    np.testing.assert_allclose(both.verified, chains.verified)
    np.testing.assert_allclose(both.kept, chains.kept)
