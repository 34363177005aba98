"""Confidence trimming against brute force and its definitions; and which of its choices look ahead."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.decision import PipelineMode, TrimRule
from faser_backend.core.frontier import Frontier
from faser_backend.core.plan import StepRecord
from faser_backend.pipeline.trim import admit, admit_by_price, chances, continues, expected_gain
from faser_backend.policy.calibration import sigmoid
from tests.pipeline.test_engine import alone
from tests.support.forced_engine import open_forced
from tests.support.forcing import ADMITS_ALL, ADMITS_NOTHING, forced, random_rule, rule
from tests.support.harness import drive, request

SLOTS = np.arange(64)  # chain b belongs to the request in slot b


def admitted_of(rule: TrimRule, frontier: Frontier) -> np.ndarray:
    return admit(rule, frontier, SLOTS[: frontier.num_rows.size])


def priced(rule: TrimRule, frontier: Frontier) -> np.ndarray:
    return admit_by_price(rule, frontier, SLOTS[: frontier.num_rows.size])


def going(rule: TrimRule, survival: np.ndarray) -> np.ndarray:
    return continues(rule, survival, SLOTS[: survival.size])


def random_chains(rng: np.random.Generator, size: int, longest: int) -> Frontier:
    counts = rng.integers(0, longest + 1, size)
    width = int(counts.max())
    margins = rng.uniform(-0.5, 5.0, (size, width)).astype(np.float32)
    return Frontier(np.zeros((size, width), np.int64), counts, counts + 1, margins)


def survival_of(rule: TrimRule, frontier: Frontier, b: int) -> list[float]:
    """Survival of the rows 1, 2, ... of chain b, with plain loops."""
    assert frontier.margins is not None
    result, product = [], 1.0
    for margin in frontier.margins[b, : frontier.num_drafted[b]].tolist():
        score = np.interp(margin, rule.margin_knots, rule.match_logits) + rule.offsets[b % rule.offsets.size]
        product *= 1.0 / (1.0 + float(np.exp(-score)))
        result.append(product)
    return result


def speed(rule: TrimRule, frontier: Frontier, rows: tuple[int, ...]) -> float:
    """Predicted tokens per time of verifying rows[b] rows of each chain."""
    tokens = len(rows) + sum(sum(survival_of(rule, frontier, b)[: count - 1]) for b, count in enumerate(rows))
    extra = min(sum(rows) - len(rows), rule.verify_us.size - 1)
    width = frontier.drafted.shape[1]
    spent_us = float(sum(rule.draft_us[np.count_nonzero(frontier.num_drafted > step)] for step in range(width)))
    return tokens / (rule.verify_us[extra] + spent_us)


@pytest.mark.parametrize("seed", range(16))
def test_admission_is_the_best_of_all_sets_of_prefixes(seed: int):
    rng = np.random.default_rng(seed)
    chosen, frontier = random_rule(rng), random_chains(rng, int(rng.integers(1, 4)), 3)
    every = itertools.product(*(range(1, count + 2) for count in frontier.num_drafted.tolist()))
    best = max(speed(chosen, frontier, rows) for rows in every)
    admitted = admitted_of(chosen, frontier)
    assert ((admitted >= 1) & (admitted <= frontier.num_drafted + 1)).all()
    assert speed(chosen, frontier, tuple(admitted.tolist())) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_admission_by_price_is_its_definition(seed: int):
    rng = np.random.default_rng(seed)
    chosen, frontier = random_rule(rng), random_chains(rng, 5, 4)
    expected = [1 + sum(a >= chosen.row_price for a in survival_of(chosen, frontier, b)) for b in range(5)]
    assert priced(chosen, frontier).tolist() == expected


def test_extremes_and_what_was_not_drafted():
    frontier = random_chains(np.random.default_rng(0), 4, 5)
    assert admitted_of(ADMITS_ALL, frontier).tolist() == (frontier.num_drafted + 1).tolist()
    assert priced(ADMITS_ALL, frontier).tolist() == (frontier.num_drafted + 1).tolist()
    assert admitted_of(ADMITS_NOTHING, frontier).tolist() == [1, 1, 1, 1]
    for without in (Frontier.empty(3), Frontier(np.zeros((2, 2), np.int64), np.array([2, 1]))):
        assert admitted_of(ADMITS_NOTHING, without) is without.num_rows
        assert priced(ADMITS_NOTHING, without) is without.num_rows


# -- looking ahead -----------------------------------------------------------------------------------------

STEPPED = rule([0.4, 0.95], [1.0, 1.65, 1.65, 1.65], price=1.0)


def test_the_best_set_looks_ahead():
    """Row 1 of one and the same first token lives or dies with draft token 2: N is no stopping time."""
    for second, rows in ((1.0, 3), (0.0, 1)):
        frontier = Frontier(np.zeros((1, 2), np.int64), np.array([2]))
        frontier.margins = np.array([[0.0, second]], np.float32)
        assert admitted_of(STEPPED, frontier).tolist() == [rows]


@pytest.mark.parametrize("seed", range(20))
def test_a_price_does_not_look_ahead(seed: int):
    """Whatever follows a draft token, in its chain or in others, does not change whether its row lives."""
    rng = np.random.default_rng(seed)
    chosen, frontier = random_rule(rng), random_chains(rng, 3, 5)
    before = priced(chosen, frontier)
    for known in range(frontier.drafted.shape[1]):
        other = random_chains(rng, 3, 5)
        width = min(frontier.drafted.shape[1], other.drafted.shape[1])
        if known > width:
            continue
        assert other.margins is not None and frontier.margins is not None
        other.margins[0, :known] = frontier.margins[0, :known]
        other.num_drafted[0] = max(other.num_drafted[0], min(known, frontier.num_drafted[0]))
        other.num_rows = other.num_drafted + 1
        after = priced(chosen, other)
        rows = np.arange(1, min(known, int(frontier.num_drafted[0])) + 1)
        assert ((rows < before[0]) == (rows < after[0])).all()


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("seed", range(20))
def test_drafting_on_is_its_definition(seed: int, size: int):
    """The rule keeps as many chains, most hopeful first, as gain most beyond the price of their call."""
    rng = np.random.default_rng(seed)
    chosen, survival = random_rule(rng), rng.random(size)
    gains = sorted(
        (
            (float(sum(s * max(a * p - chosen.row_price, 0.0) for p, s in zip(probs, shares, strict=True))), i)
            for i, a in enumerate(survival.tolist())
            for probs, shares in [
                (sigmoid(chosen.match_logits + chosen.offsets[i]).tolist(), chosen.margin_shares.tolist())
            ]
        ),
        key=lambda pair: (-pair[0], pair[1]),
    )
    nets = [0.0]
    for count in range(1, size + 1):
        nets.append(sum(g for g, _ in gains[:count]) - chosen.tokens_per_us * chosen.draft_us[count])
    best = int(np.argmax(nets))
    goes_on = going(chosen, survival)
    np.testing.assert_allclose(sorted(expected_gain(chosen, survival, SLOTS[:size]))[::-1], [g for g, _ in gains])
    assert sum(gains[i][0] for i in range(int(goes_on.sum()))) - (
        chosen.tokens_per_us * chosen.draft_us[int(goes_on.sum())] if goes_on.any() else 0.0
    ) == pytest.approx(nets[best])


def test_chances_hold_their_ends():
    chosen = rule([0.2, 0.6], [1.0, 1.0])
    assert chances(chosen, np.array([-5.0, 0.0, 9.0]), SLOTS[:3]).tolist() == pytest.approx([0.2, 0.2, 0.6])


# -- in a step ----------------------------------------------------------------------------------------------


def test_running_ahead_keeps_rows_trimmed():
    """Overlapping must not run the rows that trimming has refused."""
    refuses = rule([0.5, 0.6], [1.0, 1.2, 1e6], price=1e-7)  # one row behind each anchor at most
    fake = open_forced("fixed:4", forced(PipelineMode.RUN_AHEAD, trim=refuses), draft_noise=0.0, draft_memory=10**6)
    seen: list[StepRecord] = []
    fake.step_runner.observers.append(seen.append)
    requests = [request("r", [1, 2, 3], 30)]
    assert drive(fake.engine, requests).tokens == alone(requests)
    assert max(record.verification.num_kept.max() for record in seen) == 2
    assert any(record.plan.drafts for record in seen)


def test_blocks_are_held_as_planned_not_as_drafted():
    """A chain ahead that ended early holds what was planned for it: its own tokens decide on no preemption."""
    ends_early = rule([0.5, 0.6], [1.0, 1.0], draft_us=1.0, price=10.0)
    fake = open_forced("fixed:8", forced(PipelineMode.RUN_AHEAD, trim=ends_early), draft_noise=0.0, draft_memory=10**6)
    blocks, num_seen = fake.step_runner.scheduler.blocks, 0
    fake.engine.submit(request("r", [1, 2, 3], 60))
    run = fake.step_runner.run

    def checked(plan):
        nonlocal num_seen
        outputs, in_flight = run(plan)
        ahead = dict(zip(plan.drafts, plan.num_ahead_tokens, strict=True))
        for sequence in set(in_flight.sequences) & set(plan.decodes):
            assert int(in_flight.frontier.num_drafted.max()) < ahead[sequence]
            planned = blocks.num_blocks_for(sequence.num_tokens + ahead[sequence])
            assert blocks.num_blocks_of(sequence.slot) == planned
            num_seen += 1
        return outputs, in_flight

    fake.step_runner.run = checked  # type: ignore[method-assign]
    while fake.engine.has_work:
        fake.engine.step()
        fake.engine.check_integrity()
    assert num_seen > 5


def test_more_chains_than_a_rule_reckons_with_cost_what_its_last_count_does():
    """Before two cohorts have formed, all sequences draft in one call under a rule that was priced for half."""
    rng = np.random.default_rng(5)
    chosen, frontier = random_rule(rng), random_chains(rng, 7, 3)
    head = chosen.draft_us[:3]
    short, long = replace(chosen, draft_us=head), replace(chosen, draft_us=np.append(head, np.repeat(head[-1], 7)))
    assert admitted_of(short, frontier).tolist() == admitted_of(long, frontier).tolist()
    survival = rng.random(7)
    assert going(short, survival).tolist() == going(long, survival).tolist()
