"""Speculative lengths as pure decisions: what a policy chooses for a batch that it is shown."""

import numpy as np
import pytest

from faser_backend.core.decision import WHOLE
from faser_backend.core.sequence import Sequence
from faser_backend.lab.checks.control_worlds import costs
from faser_backend.policy.cost_model import BatchTimesCache
from faser_backend.policy.registry import Goodput, acceptance_rates
from tests.support.harness import request


def running(num_accepted: int, num_tested: int, count: int = 1) -> list[Sequence]:
    sequences = [Sequence.from_request(request(str(i), [1, 2, 3], 20), 0) for i in range(count)]
    for sequence in sequences:
        sequence.stats.num_accepted, sequence.stats.num_tested = num_accepted, num_tested
    return sequences


def test_rates_start_from_the_prior_and_follow_the_evidence():
    assert acceptance_rates(running(0, 0))[0] == pytest.approx(0.6)
    assert acceptance_rates(running(900, 1000))[0] == pytest.approx(0.9, abs=0.01)
    good, bad = running(90, 100)[0], running(10, 100)[0]
    rates = acceptance_rates([good, bad])
    assert rates[0] > 0.8 and rates[1] < 0.2


def test_goodput_speculates_while_rows_are_cheap_and_stops_when_they_are_not():
    cheap, dear = costs(1.0, 1000.0, 1.0), costs(1.0, 0.0, 1000.0)
    assert Goodput(cheap, 8).decide(running(80, 100)).num_draft_tokens == [8]
    assert Goodput(dear, 8).decide(running(80, 100)).num_draft_tokens == [0]


def test_goodput_follows_acceptance():
    model = costs(100.0, 1000.0, 20.0)
    lengths = [Goodput(model, 8).decide(running(kept, 1000)).num_draft_tokens[0] for kept in (50, 300, 600, 950)]
    assert lengths == sorted(lengths)
    assert lengths[0] < 2 < lengths[-1]


def test_goodput_is_the_best_static_length_of_its_own_model():
    model = costs(120.0, 900.0, 60.0)
    policy, sequences = Goodput(model, 8), running(70, 100, 6)
    rate = acceptance_rates(sequences)[0]
    times = BatchTimesCache(model, 8).of(6, 3, WHOLE)
    rounds = [times.verify_us[6 * k] + k * times.draft_us[6] + (k > 0) * times.draft_round_us for k in range(9)]
    speed = [6 * sum(rate**i for i in range(k + 1)) / rounds[k] for k in range(9)]
    assert policy.decide(sequences).num_draft_tokens == [int(np.argmax(speed))] * 6
