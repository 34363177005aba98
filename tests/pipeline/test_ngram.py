"""Drafting by n-grams: what is proposed, against a search of the whole text; and that tokens do not depend on it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_backend.core.decision import PipelineMode
from faser_backend.core.frontier import Frontier
from faser_backend.core.plan import PrefillChunk, StepRecord
from faser_backend.core.ports import Partition, PhaseTimes
from faser_backend.core.request import Request, Sampling
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.ngram import NgramIndex, NgramProposer
from faser_backend.pipeline.propose import Proposal
from faser_backend.pipeline.rows import DecodeBatch
from faser_backend.policy.calibration import MarginCurve, MatchCalibration, margin_bins
from tests.pipeline.test_engine import alone, random_requests
from tests.support.fakes import CountingClock, HashRunner
from tests.support.forced_engine import Case, agrees, open_forced
from tests.support.forcing import ADMITS_NOTHING, forced
from tests.support.harness import drive, fake_engine, request

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode
PARTITION = Partition(HashRunner(1, 4, 8), None, None)


def searched(text: list[int], num_tokens: int, lengths: tuple[int, int]) -> tuple[list[int], int]:
    """The answer that an index has to give, found by trying every position of the text."""
    for n in range(lengths[1], lengths[0] - 1, -1):
        for start in range(len(text) - 1, n - 1, -1):
            if text[start - n : start] == text[len(text) - n :]:
                going_on = list(text)
                while len(going_on) < len(text) + num_tokens:
                    going_on.append(going_on[start + len(going_on) - len(text)])
                agreeing = 1
                while agreeing < min(start, 14) and text[start - 1 - agreeing] == text[-1 - agreeing]:
                    agreeing += 1
                return going_on[len(text) :], agreeing
    return [], 0


# -- the index -------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 3), max_size=12)


@settings(max_examples=400, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=8), TOKENS, st.integers(1, 9), st.sampled_from([(1, 1), (1, 3), (2, 4)]))
def test_index_answers_as_a_search_of_the_whole_text(pieces, chain, num_tokens, lengths):
    """However the text came, with or without a chain behind it; and asking changes nothing."""
    index, text = NgramIndex(*lengths), []
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert index.continuation(chain, num_tokens) == searched(text + chain, num_tokens, lengths)
        assert index.continuation([], num_tokens) == searched(text, num_tokens, lengths)
        assert len(index) == len(text)


# -- the proposer ----------------------------------------------------------------------------------------


def sequence_of(tokens: list[int], slot: int = 0) -> Sequence:
    made = Sequence.from_request(Request("r", np.array(tokens, np.int64), 32, Sampling()), 0)
    made.slot = slot
    return made


def proposed(proposer: NgramProposer, sequences: list[Sequence], lengths: list[int], behind: Frontier) -> Frontier:
    batch = DecodeBatch(sequences, np.zeros((len(sequences), 1), np.int64))
    return proposer.propose(PARTITION, batch, Proposal(np.array(lengths), behind))


def new_proposer() -> NgramProposer:
    return NgramProposer(PhaseTimes(CountingClock()))


def test_frontier_of_a_batch():
    """A match, nothing wanted, no match, a chain in flight."""
    texts = [[1, 2, 3, 1, 2], [1, 1], [1, 2, 3], [4, 5, 6, 7]]
    sequences = [sequence_of(text, slot) for slot, text in enumerate(texts)]
    behind = Frontier(np.array([[0, 0], [0, 0], [0, 0], [4, 5]]), np.array([0, 0, 0, 2]))
    frontier = proposed(new_proposer(), sequences, [3, 0, 5, 2], behind)
    assert frontier.num_drafted.tolist() == [3, 0, 0, 2] and frontier.num_rows.tolist() == [4, 1, 1, 3]
    assert frontier.drafted[0].tolist() == [3, 1, 2] and frontier.drafted[3, :2].tolist() == [6, 7]
    assert frontier.candidates is None and frontier.draft_probs is None and frontier.margins is not None
    # Two tokens agree before the first draft token, three before the second, ...: each number has its own bin.
    assert margin_bins(frontier.margins[0]).tolist() == [1, 2, 3]
    assert margin_bins(frontier.margins[3, :2]).tolist() == [1, 2]


def test_calibration_learns_each_number_of_agreeing_tokens_apart():
    """A margin draws its chance from its own bin, not from a neighbour's."""
    size = MarginCurve.margin_knots.size
    frontier = proposed(new_proposer(), [sequence_of([1, 2, 1])], [size + 3], Frontier.empty(1))
    margins = frontier.margins
    assert margins is not None and (np.diff(margins[0]) >= 0).all()
    assert margin_bins(margins[0]).tolist() == [*range(size), size - 1, size - 1, size - 1]
    curve = MatchCalibration(None).curve
    np.testing.assert_allclose(curve.chances(margins[0, :size]), curve.match_probs, rtol=1e-12)


def test_sequences_are_read_once_and_forgotten():
    proposer, sequence = new_proposer(), sequence_of([1, 2, 3, 4, 1, 2])
    proposer.prefill(PARTITION, [PrefillChunk(sequence, 0, 4)])
    assert sequence.draft_len == 4
    proposer.prefill(PARTITION, [PrefillChunk(sequence, 0, 2)])
    assert sequence.draft_len == 4
    assert proposed(proposer, [sequence], [2], Frontier.empty(1)).drafted.tolist() == [[3, 4]]
    sequence.append([3])
    assert proposed(proposer, [sequence], [2], Frontier.empty(1)).drafted.tolist() == [[4, 1]]
    assert len(proposer._indexes) == 1
    proposer.forget(sequence)
    proposer.forget(sequence)
    assert not proposer._indexes


# -- the engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case() -> Case:
    requests = random_requests(0, 12)
    return Case(requests, alone(requests))


def test_rows_that_are_not_worth_it_are_left_out(case: Case):
    fake = open_forced("fixed:4", forced(SERIAL, trim=ADMITS_NOTHING), has_ngrams=True)
    seen: list[StepRecord] = []
    fake.step_runner.observers.append(seen.append)
    agrees(fake, case, None)
    drafting = [record for record in seen if record.frontier.num_drafted.any()]
    assert drafting and all((record.frontier.num_rows == 1).all() for record in drafting)


@pytest.mark.parametrize("mode", PipelineMode)
def test_a_periodic_text_is_drafted_right(mode: PipelineMode):
    """A target that depends on its last two tokens runs into a cycle, which n-grams know by heart."""
    requests = [request(f"r{i}", [i, 2, 3], 90) for i in range(3)]
    fake = open_forced("fixed:4", forced(mode), has_ngrams=True, vocab_size=5)
    plain, runner = fake_engine("none", vocab_size=5)
    for target in (*fake.targets, runner):
        target.memory, target.known = 1, {}
    assert drive(fake.engine, requests).tokens == drive(plain, requests).tokens
    metrics = fake.engine.metrics()
    assert metrics.num_accepted > 0.6 * metrics.num_drafted > 0
