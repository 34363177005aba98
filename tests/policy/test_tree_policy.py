"""`tree:N`: which nodes it takes, and what it does not go together with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import Decision, PipelineMode
from faser_backend.core.errors import ConfigError
from faser_backend.core.request import Sampling
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.device.runtime import ModelPair
from faser_backend.pipeline.draft_tree import child_log_chances, next_level
from faser_backend.policy.registry import make_policy, parse_policy
from faser_backend.serving.drafting import check_trees
from tests.cpu.test_sampler import one_row_each
from tests.support.forcing import ADMITS_ALL, always
from tests.support.harness import drive, guessed, open_fake, request


@pytest.mark.parametrize("spec", ["tree", "tree:", "tree:0", "tree:64", "tree:-1", "tree:x", "tree:4:2"])
def test_bad_sizes_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"tree:N needs an integer N in \[1, 63\]"):
        parse_policy(spec, guessed)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"acceptance": "rejection"}, "rejection sampling tests chains of draft tokens; use 'match'"),
        ({"early_exit": "on"}, "exits are calibrated for chains of draft tokens; use 'auto' or 'off'"),
        ({"pipeline": "run_ahead"}, "trees are drafted and verified in turn; use 'auto' or 'serial'"),
        ({"pipeline": "ping_pong"}, "trees are drafted and verified in turn"),
    ],
)
def test_what_trees_do_not_go_together_with(options: dict[str, str], reason: str) -> None:
    (field, value), *_ = options.items()
    with pytest.raises(ConfigError, match=f"policy = 'tree:8' with {field} = '{value}': {reason}"):
        make_policy(EngineConfig.from_options(policy="tree:8", **options), guessed, "1/1")


@pytest.mark.parametrize("runtime", ["torch", "tensorrt", "tensorrt_rtx"])
def test_who_does_not_draft_or_verify_trees(runtime: str) -> None:
    trees, chains = parse_policy("tree:4", guessed), parse_policy("fixed:4", guessed)
    pair, alone = (cast(ModelPair, SimpleNamespace(draft=draft)) for draft in (object(), None))
    with pytest.raises(ConfigError, match=f"policy = 'tree:N': '{runtime}' verifies chains; .* build for llvm"):
        check_trees(runtime, pair, trees)
    with pytest.raises(ConfigError, match="policy = 'tree:N': n-grams draft here"):
        check_trees("llvm", alone, trees)
    check_trees("llvm", pair, trees)
    check_trees(runtime, pair, chains)


@pytest.mark.parametrize("fields", [{"mode": PipelineMode.PING_PONG}, {"trim": ADMITS_ALL}, {"pruner": always()}])
def test_a_decision_is_not_both_a_tree_and_of_chains(fields: dict) -> None:
    with pytest.raises(ValueError, match="trees with"):
        Decision([4], trees=True, **fields)


def test_the_likeliest_nodes_are_taken() -> None:
    """Chances fall along a path and among siblings; what could still matter is run, best first."""
    scores = np.array([[3.0, 2.0, -np.inf], [0.0, 0.0, 0.0]])
    chances = np.exp(child_log_chances(scores, 0.7))
    np.testing.assert_allclose(chances.sum(axis=1), 1)
    assert chances[0, 0] > chances[0, 1] > chances[0, 2] == 0
    known = np.log([0.8, 0.7, 0.05, 0.01]).tolist()
    assert next_level(known, [False] * 4, 4) == [0, 1]
    assert next_level(known, [True, False, False, False], 4) == [1]
    assert next_level(known, [True, True, False, False], 4) == []
    assert next_level(known[2:], [False] * 2, 8) == [], "too unlikely a level for a call"


def test_children_are_the_best_tokens_with_noise() -> None:
    sampler = NumpySampler(50, 2)
    for slot, temperature in enumerate((0.0, 0.7)):
        sampler.add(slot, Sampling(temperature=temperature, seed=5), np.zeros(1, np.int64), 1, ())
    logits = np.random.default_rng(2).normal(size=(4, 50)).astype(np.float32)
    rows = one_row_each(np.array([0, 1, 1, 0]), np.array([3, 3, 3, 4]))
    drawn = sampler.sample_draft(logits, rows, 6)
    rows.has_siblings = True
    children = sampler.sample_children(logits, rows, 6)
    assert drawn.candidates is not None
    np.testing.assert_array_equal(children.tokens, drawn.candidates)
    np.testing.assert_allclose(children.scores[:, 0] - children.scores[:, 1], drawn.margins, rtol=1e-5)
    assert (np.diff(children.scores, axis=1) <= 0).all()
    np.testing.assert_allclose(children.scores[0], logits[0, children.tokens[0]])
    single = sampler.sample_children(logits, rows, 1)
    np.testing.assert_array_equal(single.tokens[:, 0], drawn.tokens)
    with pytest.raises(ValueError, match="num_children = 51"):
        sampler.sample_children(logits, rows, 51)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_keeps_more_than_a_chain_of_as_many_rows(temperature: float) -> None:
    """Where the draft is often wrong at first, and right at second choice."""
    tree, chain = (_kept_per_verification(policy, temperature) for policy in ("tree:8", "fixed:8"))
    assert tree > 1.1 * chain


def _kept_per_verification(policy: str, temperature: float) -> float:
    fake = open_fake(policy, draft_noise=2.0)
    rng = np.random.default_rng(1)
    requests = [
        request(str(seed), rng.integers(0, 24, 5).tolist(), 60, sampling=Sampling(temperature, seed=seed))
        for seed in range(8)
    ]
    stats = [output.stats for output in drive(fake.engine, requests, check=False).final.values()]
    return sum(s.num_accepted for s in stats if s) / sum(s.num_steps for s in stats if s)
