"""Trees in virtual time: ranks of the target's tokens, what trees keep, and the oracle of trees."""

from __future__ import annotations

import numpy as np
import pytest

from faser_backend.config import EngineConfig
from faser_backend.core.batch import SamplingRows
from faser_backend.core.request import SamplingParams
from faser_backend.core.tree import MOST_CHILDREN
from lab.contestants import ORACLE, TREE_ORACLE, TREE_WHOLE, simulated_contestants
from lab.simulation.acceptance import Outcomes, demo_process
from lab.simulation.engine import Outcome, build_sim_engine, run_closed_loop
from lab.simulation.fit_ranks import held_out_difference
from lab.simulation.ports import SimSampler
from lab.simulation.ranks import RankLaw, demo_ranks
from lab.simulation.worlds import roofline_world
from lab.traces import Trace

NUM_TOKENS = 40


def simulated(policy: str, name: str = "") -> Outcome:
    """Eight requests, four at once."""
    world = roofline_world("h100", "qwen3-32b/0.6b", max_context=400)
    config = EngineConfig.from_options(policy=policy, max_num_seqs=4)
    sim = build_sim_engine(world, config, seed=0, max_output_tokens=NUM_TOKENS, name=name)
    trace = Trace(np.zeros(8), np.full(8, 100), np.full(8, NUM_TOKENS), "made up")
    return run_closed_loop(sim, trace, 4)


def kept(outcome: Outcome) -> float:
    return outcome.summary()["mean_accepted"]


def test_ranks_and_leads_are_fitted_by_margin():
    rng = np.random.default_rng(0)
    margins = rng.exponential(2.0, 40_000)
    planted = np.where(margins < 1.0, 1, np.where(rng.random(margins.size) < 0.5, 2, MOST_CHILDREN))
    ranks = np.where(rng.random(margins.size) < 0.5, 0, planted)
    places = np.arange(MOST_CHILDREN)
    scores = -(margins[:, None] + (places - 1) * 0.5) * (places > 0)
    law = RankLaw.fitted(margins, ranks, scores)
    np.testing.assert_allclose(law.shares.sum(axis=1), 1.0)
    assert law.shares[0, 0] > 0.95 and law.shares[6, 0] < 0.05
    assert max(map(abs, held_out_difference(law, margins, ranks))) < 0.01
    np.testing.assert_allclose(law.scores(margins), scores, atol=0.05)
    shuffled = RankLaw(law.shares[::-1], law.leads)
    assert max(map(abs, held_out_difference(shuffled, margins, ranks))) > 0.1, "shares that belong to other margins"


def test_the_law_is_the_demo_pairs():
    """The target draws one of the draft's 1, 2, 4, 8 best so often (docs/trees.md, over other texts)."""
    margins, matches, _ = demo_process("sampled").sample(200, 100)
    is_match = matches.reshape(-1)
    ranks = demo_ranks().draw(np.random.default_rng(1), margins.reshape(-1), is_match)
    assert (ranks[is_match] == 0).all() and (ranks[~is_match] > 0).all()
    within = [(ranks < count).mean() for count in (1, 2, 4, 8)]
    np.testing.assert_allclose(within, [0.72, 0.84, 0.91, 0.95], atol=0.02)


def test_children_hold_the_targets_token_at_its_rank_behind_the_true_prefix_alone():
    outcomes = Outcomes(demo_process("sampled"), 0, 2, 50, rank_law=demo_ranks())
    sampler = SimSampler(outcomes)
    sampler.add(1, SamplingParams(seed=7), np.zeros(5, np.int64), 5, ())
    positions = np.arange(6, 46)
    slots, size = np.ones(positions.size, np.int64), positions.size
    before = outcomes.target(slots, positions - 1)[:, None]
    drafted, margins = outcomes.draft(slots, positions)
    for wrong in (0, 1):
        rows = SamplingRows(slots, positions, np.arange(size), np.ones(size, np.int64), before + wrong, True)
        children = sampler.sample_children(np.zeros((size, 1)), rows, MOST_CHILDREN)
        is_it = children.tokens == outcomes.target(slots, positions)[:, None]
        assert (np.diff(children.scores, axis=1) <= 1e-6).all()
        if wrong:
            assert not is_it.any()
            continue
        is_match = drafted == outcomes.target(slots, positions)
        assert (is_it[:, 0] == is_match).all() and is_it.sum(axis=1).max() == 1
        assert is_it[~is_match].any() and not is_it[~is_match].any(axis=1).all()
        np.testing.assert_allclose(-children.scores[:, 1], margins, rtol=1e-5)


def test_second_choices_count_and_the_oracle_knows_all_of_them(monkeypatch: pytest.MonkeyPatch):
    chain, tree = simulated("fixed:8"), simulated("tree:8")
    best, chains = simulated("none", TREE_ORACLE), simulated("none", ORACLE)
    assert kept(tree) < kept(best) and kept(chains) < kept(best)
    assert [answer.digest for answer in tree.answers] == [answer.digest for answer in chain.answers]
    figures = best.summary()
    assert figures["rows_drafted"] == sum(answer.num_accepted for answer in best.answers), "each row emits a token"
    law = demo_ranks()
    never = np.zeros_like(law.shares)
    never[:, -1] = 1.0
    monkeypatch.setattr("lab.simulation.engine.demo_ranks", lambda: RankLaw(never, law.leads))
    assert kept(simulated("tree:8")) < 0.9 * kept(tree), "a tree whose second choices are never right"


def test_the_oracle_of_trees_is_a_contestant_of_simulations():
    chosen, _ = simulated_contestants([TREE_WHOLE, "tree:4", TREE_ORACLE])
    assert [each.name for each in chosen] == ["none", "tree:4", TREE_WHOLE, TREE_ORACLE]


def test_the_price_rule_weighs_trees_where_it_is_told_that_they_can_be_drafted():
    """By the name of the contestant alone; it drafts some, and tokens are the same."""
    chains, trees = simulated("faser"), simulated("faser", TREE_WHOLE)
    assert [answer.digest for answer in trees.answers] == [answer.digest for answer in chains.answers]
    assert has_weighed_trees(trees) and not has_weighed_trees(chains)


def has_weighed_trees(outcome: Outcome) -> bool:
    """They are weighed once some were seen."""
    return any(score.is_tree for note in outcome.log.notes for score in note.scores)
