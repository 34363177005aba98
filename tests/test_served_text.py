"""Text that was served before: what is found in it, how much of it is kept, and that tokens do not depend on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_backend.core.decision import PipelineMode
from faser_backend.core.frontier import MAIN, SERVED, Frontier
from faser_backend.core.record import StepRecord
from faser_backend.core.request import SamplingParams
from faser_backend.pipeline.ngram import NgramProposer
from faser_backend.pipeline.served_text import MATCH_LENGTHS, ServedText
from faser_backend.pipeline.timing import PhaseTimes
from tests.fakes import CountingClock
from tests.forced_engine import Case, agrees, open_forced
from tests.forcing import forced
from tests.harness import drive, request
from tests.test_engine import alone, random_requests
from tests.test_ngram import proposed, sequence_of


def searched(texts: list[list[int]], capacity: int, tail: list[int], num_tokens: int) -> tuple[list[int], int]:
    """What has to be found, by looking at every position of what is left of the texts."""
    ring = [token for text in texts if text and capacity > 1 for token in [*text[-(capacity - 1) :], -1]]
    held = ring[-capacity:]
    for n in MATCH_LENGTHS:
        for start in range(len(held) - 1, n - 1, -1):
            is_match = len(tail) >= n and held[start - n : start] == tail[-n:] and held[start] >= 0
            if is_match:
                agreeing = n
                while agreeing < min(start, len(tail)) and held[start - 1 - agreeing] == tail[-1 - agreeing]:
                    agreeing += 1
                copied = held[start : start + num_tokens]
                return copied[: copied.index(-1)] if -1 in copied else copied, agreeing
    return [], 0


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=10)


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.integers(1, 40), st.lists(st.integers(0, 2), max_size=14), st.integers(1, 6))
def test_answers_as_a_search_of_all_that_is_held(texts, capacity, tail, num_tokens):
    served = ServedText(capacity)
    for count, text in enumerate(texts, 1):
        served.add(np.array(text, np.int64))
        assert served.continuation(tail, num_tokens) == searched(texts[:count], capacity, tail, num_tokens)
        assert len(served) <= capacity and served.num_entries <= len(MATCH_LENGTHS) * len(served)


def test_memory_is_bounded_and_the_oldest_text_leaves_first():
    served, rng = ServedText(500), np.random.default_rng(0)
    first = rng.integers(0, 1000, 100)
    served.add(first)
    assert served.continuation(first[:6].tolist(), 3)[0] == first[6:9].tolist()
    for _ in range(4):
        served.add(rng.integers(1000, 2000, 100))
        assert len(served) <= 500
    assert served.continuation(first[10:16].tolist(), 3)[0] == first[16:19].tolist(), "its beginning alone has left"
    assert served.continuation(first[:6].tolist(), 3) == ([], 0)
    for _ in range(200):
        served.add(rng.integers(0, 10**6, int(rng.integers(0, 900))))
        assert len(served) <= 500 and served.num_entries <= 1000
    assert served.continuation(first[10:16].tolist(), 3) == ([], 0)


def test_the_match_in_which_more_tokens_agree_is_proposed():
    served = ServedText(100)
    served.add(np.array([9, 1, 2, 3, 4, 5]))
    proposer = NgramProposer(PhaseTimes(CountingClock()), 16, keeps_probs=False, served=served)
    sequences = [sequence_of([2, 3, 7, 1, 2, 3]), sequence_of([1, 2, 3, 7, 1, 2, 3], 1), sequence_of([6, 1, 2, 3], 2)]
    frontier = proposed(proposer, sequences, [2, 2, 2], Frontier.empty(3))
    assert frontier.drafted.tolist() == [[4, 5], [7, 1], [4, 5]]
    assert frontier.sources is not None and frontier.sources.tolist() == [SERVED, MAIN, SERVED]


def test_a_preempted_sequence_has_not_ended():
    served = ServedText(100)
    proposer = NgramProposer(PhaseTimes(CountingClock()), 16, keeps_probs=False, served=served)
    sequence = sequence_of([1, 2, 3, 4])
    sequence.slot = -1
    proposer.forget(sequence)
    assert len(served) == 0
    sequence.slot = 3
    proposer.forget(sequence)
    assert len(served) == 5


@pytest.mark.parametrize("mode", PipelineMode)
@pytest.mark.parametrize("has_both", [False, True])
def test_answers_that_come_again_are_drafted_from_those_before(mode: PipelineMode, has_both: bool):
    """With the tokens of plain decoding; and other requests' seeds give other answers all the same."""
    requests = random_requests(0, 8)
    case = Case(requests, alone(requests))
    served = ServedText(2000)
    fake = open_forced(
        "fixed:4", forced(mode), served=served, num_blocks=60, has_ngrams=not has_both, has_both=has_both
    )
    seen: list[StepRecord] = []
    fake.stepper.observers.append(seen.append)
    for _ in range(2):
        agrees(fake, case, None)
    metrics = fake.engine.metrics()
    assert metrics.num_accepted_by_source["served"] > 0.5 * metrics.num_drafted_by_source["served"] > 0
    again = [request("s", [3, 1, 2], 30, sampling=SamplingParams(temperature=4.0, seed=seed)) for seed in range(2)]
    answers = [drive(fake.engine, [each]).tokens["s"] for each in again]
    assert answers[0] != answers[1] and answers == [alone([each])["s"] for each in again]
