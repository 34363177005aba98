"""What is believed of draft tokens' chances: greedy and sampled requests are learned apart and priced together."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from faser_backend.policy.beliefs import KINDS, Beliefs
from faser_backend.policy.forced import ForcedExit
from faser_backend.policy.pricing import Pricer
from faser_backend.policy.survival import Survival

from faser_backend.core.decision import WHOLE, ExitView, PipelineMode
from faser_backend.core.frontier import Frontier
from faser_backend.policy.calibration import MARGIN_KNOTS, MarginCounts, MarginCurve, MatchCalibration
from faser_backend.policy.early_exit import ExitCalibration
from faser_backend.policy.speculation import FixedLength, Knowledge
from tests.forcing import rule
from tests.harness import guessed
from tests.kinds import K, batch, drawn, random_kinds, record

TRIM = rule([0.5, 0.6], [1.0, 1.0])


def looked(beliefs: Beliefs, kinds: str) -> Beliefs:
    beliefs.look_at(batch(kinds))
    return beliefs


def believed(beliefs: Beliefs, kinds: str) -> list[np.ndarray]:
    """All that is learned: survival [K], and of the curve the chances [M] and shares [M]."""
    looked(beliefs, kinds)
    return [beliefs.survival.copy(), beliefs.curve.match_probs.copy(), beliefs.curve.margin_shares.copy()]


def equal(left: list[np.ndarray], right: list[np.ndarray]) -> list[bool]:
    return [np.array_equal(one, other) for one, other in zip(left, right, strict=True)]


def learned(seed: int, margins: dict[str, MarginCounts] | None = None, num_steps: int = 150) -> Beliefs:
    """After mixed steps of random batches."""
    rng, beliefs = np.random.default_rng(seed), Beliefs(margins or {}, K)
    for _ in range(num_steps):
        beliefs.observe(drawn(rng, random_kinds(rng)).record())
    return beliefs


def counts(seed: int, rate: float) -> MarginCounts:
    rng = np.random.default_rng(seed)
    margins = rng.exponential(2.0, 5000)
    return MarginCounts.of(margins, rng.random(5000) < rate)


KNOWN = {"greedy": counts(0, 0.9), "sampled": counts(1, 0.5)}

# -- learning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rejected", "other"), [("s", "g"), ("g", "s")])
def test_rejections_of_one_kind_leave_the_other_as_it_was(rejected: str, other: str) -> None:
    beliefs = Beliefs({}, K)
    margins = np.full((4, K), 1.2, np.float32)
    before, version = believed(beliefs, other), beliefs.version
    for _ in range(300):
        beliefs.observe(record(rejected * 4, [0] * 4, margins=margins))
    assert all(equal(believed(beliefs, other), before)) and beliefs.version == version and beliefs.num_tests == 0
    looked(beliefs, rejected)
    assert beliefs.survival[0] < 0.1 < before[0][0] and beliefs.num_tests > 500
    assert beliefs.curve.chances(margins)[0, 0] < 0.1 and beliefs.chances(margins)[0, 0] < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_mixed_step_go_to_their_kinds_exactly(seed: int) -> None:
    """As if the rows of each kind had been steps of their own."""
    rng = np.random.default_rng(seed)
    together, apart = Beliefs({}, K), {kind: Beliefs({}, K) for kind in "gs"}
    for number in range(200):
        step = drawn(rng, random_kinds(rng))
        mode = PipelineMode.RUN_AHEAD if number % 7 == 0 else PipelineMode.SERIAL
        options = {"trim": TRIM if number % 3 == 0 else None, "mode": mode}
        together.observe(step.record(**options))
        for kind, beliefs in apart.items():
            rows = [b for b, each in enumerate(step.kinds) if each == kind]
            if rows:
                beliefs.observe(step.record(rows, **options))
    for kind, beliefs in apart.items():
        assert all(equal(believed(together, kind), believed(beliefs, kind)))
        assert together.num_tests == beliefs.num_tests > 200
    assert not any(equal(believed(together, "g"), believed(together, "s"))), "else kinds would not matter"
    assert not any(equal(believed(apart["g"], "g"), believed(apart["g"], "s"))), "nor would they have learned"


def test_frontiers_that_ran_ahead_teach_the_curve_but_not_how_far_chains_survive() -> None:
    margins = np.full((4, K), 1.2, np.float32)
    for kinds in ("gggg", "gssg"):
        beliefs, untaught = Beliefs({}, K), Beliefs({}, K)
        for _ in range(100):
            beliefs.observe(record(kinds, [0] * 4, margins=margins, mode=PipelineMode.RUN_AHEAD))
        for kind in set(kinds):
            survives, chances, shares = equal(believed(beliefs, kind), believed(untaught, kind))
            assert survives and not chances and not shares and beliefs.num_tests == 0


def test_of_trimmed_chains_the_first_token_alone_teaches_how_far_they_survive() -> None:
    for kinds in ("gggg", "gssg"):
        trimmed, whole = Beliefs({}, K), Beliefs({}, K)
        for beliefs, trim in ((trimmed, TRIM), (whole, None)):
            for _ in range(100):
                beliefs.observe(record(kinds, [1] * 4, trim=trim))
        for kind in set(kinds):
            leant, tested = believed(trimmed, kind)[0], believed(whole, kind)[0]
            assert leant[0] == tested[0] > 0.85
            assert leant[1] > 0.8 * leant[0] and tested[1] < 0.3 * tested[0]


def test_drafts_without_margins_teach_how_far_chains_survive_alone() -> None:
    beliefs, untaught = Beliefs({}, K), Beliefs({}, K)
    for _ in range(100):
        beliefs.observe(record("gsgs", [0] * 4))
    for kind in "gs":
        assert equal(believed(beliefs, kind), believed(untaught, kind)) == [False, True, True]


def test_steps_without_drafts_teach_nothing() -> None:
    beliefs, untaught = Beliefs({}, K), Beliefs({}, K)
    for kinds in ("gg", "ss", "gs") * 100:
        beliefs.observe(record(kinds, [0, 0], num_drafted=[0, 0], margins=np.ones((2, K), np.float32)))
    for kind in "gs":
        assert all(equal(believed(beliefs, kind), believed(untaught, kind))) and beliefs.num_tests == 0


# -- priors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds_known", [KINDS, ("greedy",), ("sampled",), ()])
def test_each_kind_begins_with_its_own_counts_or_with_the_guess(kinds_known: tuple[str, ...]) -> None:
    beliefs = Beliefs({kind: KNOWN[kind] for kind in kinds_known}, K)
    for letter, kind in zip("gs", KINDS, strict=True):
        curve = MatchCalibration(KNOWN[kind] if kind in kinds_known else None).curve
        survival, chances, shares = believed(beliefs, letter)
        assert np.array_equal(chances, curve.match_probs) and np.array_equal(shares, curve.margin_shares)
        np.testing.assert_allclose(survival, curve.mean_chance ** np.arange(1, K + 1))
    chances = {MatchCalibration(each).curve.mean_chance for each in (*KNOWN.values(), None)}
    assert all(high - low > 0.05 for low, high in pairwise(sorted(chances))), "else nothing would be told apart"


# -- mixed batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["gs", "gss", "gsgg", "s" * 7 + "g"])
def test_a_mixed_batch_survives_as_its_requests_do_on_average(kinds: str) -> None:
    beliefs = learned(0, KNOWN)
    of = {kind: looked(beliefs, kind).survival for kind in "gs"}
    tests = {kind: looked(beliefs, kind).num_tests for kind in "gs"}
    looked(beliefs, kinds)
    np.testing.assert_allclose(beliefs.survival, np.mean([of[kind] for kind in kinds], axis=0))
    assert beliefs.num_tests == pytest.approx(np.mean([tests[kind] for kind in kinds]))
    assert (of["g"] > of["s"] + 0.1).all() and tests["g"] != tests["s"]


@pytest.mark.parametrize("kinds", ["gs", "gss", "gsgg"])
def test_the_curve_of_a_mixed_batch_by_hand(kinds: str) -> None:
    beliefs = learned(1, KNOWN)
    greedy, sampled = (looked(beliefs, kind).curve for kind in "gs")
    share = kinds.count("s") / len(kinds)
    assert looked(beliefs, kinds + "gs").curve.mean_chance > sampled.mean_chance, "of other shares, before"
    curve = looked(beliefs, kinds).curve
    assert beliefs.curve is curve, "kept while nothing changes"
    for each in range(MARGIN_KNOTS.size):
        of_greedy = (1 - share) * float(greedy.margin_shares[each])
        of_sampled = share * float(sampled.margin_shares[each])
        hits = of_greedy * float(greedy.match_probs[each]) + of_sampled * float(sampled.match_probs[each])
        assert curve.margin_shares[each] == pytest.approx(of_greedy + of_sampled)
        assert curve.match_probs[each] == pytest.approx(hits / (of_greedy + of_sampled))
    assert curve.margin_shares.sum() == pytest.approx(1.0)
    assert curve.mean_chance == pytest.approx((1 - share) * greedy.mean_chance + share * sampled.mean_chance)
    margins = np.array([[0.1, 1.2], [3.3, 40.0]])
    np.testing.assert_array_equal(beliefs.chances(margins), np.interp(margins, curve.margin_knots, curve.match_probs))


def test_a_mixed_curve_follows_what_either_kind_learns() -> None:
    margins = np.full((8, K), 1.2, np.float32)
    for kind in "gs":
        beliefs = looked(Beliefs(KNOWN, K), "gs")
        before = beliefs.chances(margins)[0, 0]
        for _ in range(50):
            beliefs.observe(record(kind * 8, [0] * 8, margins=margins))
        assert beliefs.chances(margins)[0, 0] < before - 0.1


def test_a_share_of_none_or_all_gives_the_curves_themselves() -> None:
    greedy, sampled = (MatchCalibration(each).curve for each in KNOWN.values())
    for share, expected in ((0.0, greedy), (1.0, sampled)):
        mixed = greedy.mixed(sampled, share)
        np.testing.assert_allclose(mixed.margin_shares, expected.margin_shares, rtol=1e-12)
        np.testing.assert_allclose(mixed.match_probs, expected.match_probs, rtol=1e-12)
        assert mixed.mean_chance == pytest.approx(expected.mean_chance)
    assert np.abs(greedy.match_probs - sampled.match_probs).max() > 0.1


def test_mixing_counts_each_margin_as_often_as_it_occurs() -> None:
    """Where only one of the curves has tokens, its chance holds whatever the share."""
    size = MARGIN_KNOTS.size
    ends = np.zeros((2, size))
    ends[0, :2], ends[1, 1:3] = 0.5, 0.5
    low, high = (MarginCurve(ends[each] + 1e-12, np.full(size, chance)) for each, chance in enumerate((0.2, 0.8)))
    mixed = low.mixed(high, 0.25)
    assert mixed.match_probs[:3] == pytest.approx([0.2, 0.75 * 0.2 + 0.25 * 0.8, 0.8])
    assert mixed.margin_shares[:3] == pytest.approx([0.375, 0.5, 0.125])


# -- versions ------------------------------------------------------------------------------------------


def test_a_version_stands_for_one_survival() -> None:
    """Across kinds, shares and all that is learned: what was priced under a version is found under no other."""
    rng, beliefs = np.random.default_rng(4), Beliefs(KNOWN, K)
    seen: dict[object, bytes] = {}
    batches = ["g", "s", "gs", "gss", "gggs", "ggss"]
    for _ in range(400):
        beliefs.observe(drawn(rng, random_kinds(rng)).record())
        for each in batches:
            looked(beliefs, each)
            assert seen.setdefault(beliefs.version, beliefs.survival.tobytes()) == beliefs.survival.tobytes()
    assert len(seen) > 50, "survival changed often"


def test_versions_differ_between_kinds_and_shares_that_begin_alike() -> None:
    beliefs = Beliefs({}, K)
    batches = ["g", "s", "gs", "gss", "ggs", "gggs"]
    assert len({looked(beliefs, kinds).version for kinds in batches}) == len(batches)
    assert looked(beliefs, "gs").version == looked(beliefs, "ggss").version, "the share counts, not the size"
    assert looked(beliefs, "gg").version == looked(beliefs, "g").version


def test_what_was_priced_for_one_kind_is_not_taken_for_another() -> None:
    pricer = Pricer(Knowledge(guessed().costs, KNOWN), K)
    times = pricer.times(4, 32, WHOLE)
    speeds = []
    for kinds in ("gggg", "ssss", "gggs", "ggss", "gggg"):
        pricer.beliefs.look_at(batch(kinds))
        speed, length = pricer.best_uniform(times, is_trimmed=False)
        fresh = pricer.uniform_speeds(times)
        assert speed == fresh.max() and length == fresh.argmax() + 1
        speeds.append(speed)
    assert speeds[0] == speeds[4] > speeds[2] > speeds[3] > speeds[1]


# -- policies ------------------------------------------------------------------------------------------


def test_a_rule_has_the_chances_of_its_batch() -> None:
    policy = Survival(Knowledge(guessed().costs, KNOWN), K)
    curves = {"g": MatchCalibration(KNOWN["greedy"]).curve, "s": MatchCalibration(KNOWN["sampled"]).curve}
    for kinds in ("gg", "ss", "gg"):
        trim = policy.decide(batch(kinds)).trim
        assert trim is not None
        assert np.array_equal(trim.match_probs, curves[kinds[0]].match_probs)
        assert np.array_equal(trim.margin_shares, curves[kinds[0]].margin_shares)


# Keeps what the draft alone is sure enough of: its own margins weigh nothing.
BY_CHANCE = ExitCalibration(0, 2, 0.0, 1.0, 0.0, 0.7, 0.95, (0.1,), 0.99, 0.05)


def num_kept_by(policy: ForcedExit, kinds: str) -> int:
    """Of the two rows of a chain whose token is two logits ahead."""
    pruner = policy.decide(batch(kinds)).pruner
    assert pruner is not None
    frontier = Frontier.whole(np.zeros((1, 1), np.int64), np.ones(1, np.int64))
    frontier.margins = np.full((1, 1), 2.0, np.float32)
    return int(pruner.keep(ExitView(0, np.zeros((1, 1), np.float32), frontier, np.array([2])))[0])


def test_an_exit_has_the_chances_of_its_batch_and_follows_its_kind() -> None:
    policy = ForcedExit(FixedLength(1), Knowledge(guessed().costs, KNOWN, (BY_CHANCE,)), is_on=True)
    assert [num_kept_by(policy, kinds) for kinds in ("g", "s", "g")] == [2, 1, 2]
    for _ in range(50):
        policy.observe(record("s" * 8, [K] * 8, margins=np.full((8, K), 2.0, np.float32)))
    assert [num_kept_by(policy, kinds) for kinds in ("g", "s")] == [2, 2]
    for _ in range(50):
        policy.observe(record("g" * 8, [0] * 8, margins=np.full((8, K), 2.0, np.float32)))
    assert [num_kept_by(policy, kinds) for kinds in ("g", "s")] == [1, 2]
