"""What trees are counted to come to, by the chances of their nodes, and what batches of them take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from faser_backend.core.decision import WHOLE, Decision, TreeRule
from faser_backend.core.frontier import Acceptance, AcceptedPath, Frontier
from faser_backend.core.record import StepRecord
from faser_backend.core.tree import Tree
from faser_backend.pipeline.in_flight import stack
from faser_backend.policy.batch_times import BatchTimes
from faser_backend.policy.calibration import MatchCalibration
from faser_backend.policy.candidates import ChainTable, plain_score, serial_score
from faser_backend.policy.cost_model import CostModel
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS
from faser_backend.policy.traffic import ChainYield
from faser_backend.policy.tree_yield import CUTS, TreeYield
from lab.control_worlds import costs

FIRST, BEHIND = 3, 3  # nodes behind the anchor, and behind the best of them
PARENTS = np.array([0] * FIRST + [1] * BEHIND)
TRUTH = 0.6  # of a path's own chance by every step that the draft gives: it believes too much of itself


class Law:
    """Trees of two levels whose chances are known: the draft's, and the true ones that nodes are kept with."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def trees(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The draft's chances of nodes, the true ones, and whether they are kept: [size, 6] each."""
        rng = self._rng
        first, behind = (np.sort(rng.dirichlet(np.full(n + 1, 0.8), size))[:, ::-1][:, :n] for n in (FIRST, BEHIND))
        chances = np.concatenate([first, first[:, :1] * behind], axis=1)
        truth = np.concatenate([TRUTH * first, TRUTH**2 * first[:, :1] * behind], axis=1)
        one, other = (
            (rng.random(size)[:, None] < TRUTH * each.cumsum(axis=1)).cumsum(axis=1) == 1 for each in (first, behind)
        )
        return chances, truth, np.concatenate([one, one[:, :1] & other], axis=1)


def record_of(
    chances: np.ndarray, is_kept: np.ndarray, min_chance: float = 0.0, propose_us: float = 0.0, **fields: Any
) -> StepRecord:
    """A step whose trees end at min_chance; the best node of a tree needs none."""
    is_there = chances >= min_chance
    is_there[:, 0] = True
    size = len(chances)
    counts = is_there.sum(axis=1)
    parents, logs = np.zeros((2, size, chances.shape[1]))
    rows = np.zeros((size, 3), np.int64)
    for index in range(size):
        columns = np.flatnonzero(is_there[index])
        parents[index, : columns.size] = PARENTS[columns]
        logs[index, : columns.size] = np.log(chances[index, columns])
        kept = 1 + np.flatnonzero(is_kept[index, columns])
        rows[index, 1 : 1 + kept.size] = kept
    tree = Tree(parents.astype(np.int64), np.zeros_like(parents, np.int64), logs)
    frontier = Frontier(np.zeros_like(tree.parents), counts, counts + 1, tree=tree, **fields)
    num_kept = (is_kept & is_there).sum(axis=1)
    acceptance = Acceptance(rows, num_kept, num_kept + 1, AcceptedPath(rows, num_kept))
    plan = SimpleNamespace(decision=Decision(counts.tolist(), tree=TreeRule(min_chance, 0.5)))
    step = SimpleNamespace(frontier=frontier, acceptance=acceptance, plan=plan, propose_us=propose_us)
    return cast(StepRecord, step)


def taught(trees: TreeYield, num_steps: int = 250, min_chance: float = 0.0, seed: int = 0) -> list[np.ndarray]:
    """Teaches it steps of six trees; returns the truth about trees that end at each cut: nodes and kept ones, [G]."""
    law, truth = Law(seed), []
    for _ in range(num_steps):
        chances, true, is_kept = law.trees(6)
        trees.observe(record_of(chances, is_kept, min_chance))
        is_above = chances[:, :, None] >= CUTS
        truth.append([is_above.sum(axis=1).mean(axis=0), (true[:, :, None] * is_above).sum(axis=1).mean(axis=0)])
    return list(np.mean(truth, axis=0))


def check_counts(trees: TreeYield) -> None:
    nodes, kept = taught(trees)
    found_nodes, found_kept, depths = trees.by_cut()
    np.testing.assert_allclose(found_nodes, nodes, atol=0.05)
    np.testing.assert_allclose(found_kept, kept, atol=0.06)
    assert (np.diff(depths) >= 0).all() and depths[-1] == 2.0


class Believer(TreeYield):
    """Wrong: takes the draft's own chances for what nodes are worth."""

    def by_cut(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        nodes, _, depths = super().by_cut()
        middles = np.sqrt(CUTS * np.array([1.0, *CUTS[:-1]]))
        return nodes, (np.diff(nodes, prepend=0.0) * middles).cumsum(), depths


# -- what is counted -----------------------------------------------------------------------------------


def test_kept_nodes_are_counted_by_chance() -> None:
    check_counts(TreeYield(8))


def test_the_drafts_own_word_is_not_what_nodes_are_worth() -> None:
    with pytest.raises(AssertionError):
        check_counts(Believer(8))


def test_trees_that_end_early_leave_alone_what_lies_below() -> None:
    trees = TreeYield(8)
    nodes, kept = taught(trees)
    before = trees.by_cut()
    taught(trees, 100, min_chance=0.25, seed=1)
    is_below = CUTS < 0.25
    for was, now, true in zip(before, trees.by_cut(), (nodes, kept), strict=False):
        np.testing.assert_allclose(np.diff(now)[is_below[1:]], np.diff(was)[is_below[1:]], rtol=1e-9)
        np.testing.assert_allclose(now, true, atol=0.1)


def test_chains_beside_trees_teach_nothing() -> None:
    chances, _, is_kept = Law(0).trees(6)
    trees = TreeYield(8)
    trees.observe(record_of(chances, is_kept, is_client=np.ones(6, np.bool_)))
    assert trees.by_cut()[0].max() == 0.0
    both, few = TreeYield(8), TreeYield(8)
    is_client = np.arange(6) >= 2
    both.observe(record_of(chances, is_kept, is_client=is_client))
    few.observe(record_of(chances[:2], is_kept[:2]))
    np.testing.assert_array_equal(both.by_cut(), few.by_cut())
    step = record_of(chances[:2], is_kept[:2])
    in_flight = Frontier.whole(np.zeros((1, 6), np.int64), np.array([6]))
    path = AcceptedPath(np.concatenate([step.acceptance.path.rows, [[0, 1, 2]]]), np.array([1, 1, 2]))  # type: ignore[union-attr]
    accepted = np.append(step.acceptance.num_accepted, 2)
    mixed = SimpleNamespace(
        frontier=stack(step.frontier, in_flight),
        acceptance=Acceptance(path.rows, accepted, accepted + 1, path),
        plan=step.plan,
    )
    beside = TreeYield(8)
    beside.observe(cast(StepRecord, mixed))
    np.testing.assert_array_equal(beside.by_cut(), few.by_cut())


@pytest.mark.parametrize("size", [1, 4, 20, 250])
def test_three_steps_are_enough_to_weigh_trees(size: int) -> None:
    """And what they come to is that of the best cut, in batches of any size."""
    trees, law = TreeYield(8), Law(3)
    for count in range(3):
        chances, _, is_kept = law.trees(size)
        assert size > 10 or trees.is_known == (size * count >= 12)
        trees.observe(record_of(chances, is_kept, 0.09))
    assert trees.is_known
    score = trees.score(times_of(costs(100.0, 2e5, 0.0), size))
    assert score.floor < 0.3 and score.num_rows > size


# -- what trees come to ----------------------------------------------------------------------------------


def times_of(model: CostModel, size: int) -> BatchTimes:
    return BatchTimes(model, size, 32, WHOLE, MAX_ADAPTIVE_TOKENS)


def test_trees_are_wide_where_rows_are_free_and_narrow_where_they_are_dear() -> None:
    trees = TreeYield(8)
    taught(trees)
    free, dear = (times_of(costs(50.0, *each), 4) for each in ((5000.0, 0.1), (50.0, 400.0)))
    wide, narrow = trees.score(free), trees.score(dear)
    assert wide.is_tree and wide.floor <= 0.09 and narrow.floor >= 0.5
    assert wide.num_rows > 2 * narrow.num_rows
    assert wide.tokens_per_us > 1.2 * plain_score(free).tokens_per_us
    assert narrow.tokens_per_us < plain_score(dear).tokens_per_us, "a row costs as much as a step"


def test_trees_that_nobody_has_seen_stand_for_chains_with_more_rows() -> None:
    chances = ChainTable(MatchCalibration(None).curve, MAX_ADAPTIVE_TOKENS).of(np.zeros(4))
    trees = TreeYield(8)
    for row_us, most in ((0.0, 1.02), (100.0, 4.0)):
        times = times_of(costs(50.0, 1000.0, row_us), 4)
        chains = serial_score(times, chances, ChainYield())
        unknown = trees.unknown_score(times, chains)
        assert unknown.is_tree and unknown.num_tokens == chains.num_tokens
        assert unknown.num_rows == 32.0 > chains.num_rows
        more_us = (row_us + 1.0) * (unknown.num_rows - chains.num_rows)
        assert unknown.step_us - chains.step_us == pytest.approx(more_us)
        assert unknown.step_us < most * chains.step_us


def test_a_level_has_to_be_worth_its_call() -> None:
    trees, price = TreeYield(8), 1e-3
    cheap, dear = (times_of(costs(us, 2000.0, 5.0), 1) for us in (80.0, 240.0))
    many = times_of(costs(240.0, 2000.0, 5.0), 4)
    assert trees.level_chance(dear, price) > 2 * trees.level_chance(cheap, price)
    assert trees.level_chance(dear, 1.5 * price) == pytest.approx(1.5 * trees.level_chance(dear, price))
    assert trees.level_chance(many, price) < 0.5 * trees.level_chance(dear, price), "one call for more trees"
    assert trees.level_chance(dear, 1.0) < 1.0, "a sure level is run"
    assert trees.level_chance(cheap, 0.0) > 0.0


def test_drafting_that_takes_twice_as_long_is_expected_to() -> None:
    trees = TreeYield(8)
    taught(trees)
    times = times_of(costs(200.0, 2000.0, 5.0), 6)
    level, score = trees.level_chance(times, 1e-3), trees.score(times)
    for num_steps in range(100):
        chances, _, is_kept = Law(num_steps).trees(6)
        predicted_us = times.draft_round_us + 2 * float(times.draft_us[6])
        trees.observe_time(record_of(chances, is_kept, propose_us=2 * predicted_us), times)
    assert trees.level_chance(times, 1e-3) == pytest.approx(2 * level, rel=0.05)
    assert trees.score(times).step_us - score.step_us > 0.5 * float(times.draft_us[6])
