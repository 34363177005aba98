"""Trees that a device drafts level by level without the host, on torch's CPU device: those of the host's choice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from faser_backend.core.decision import TreeRule
from faser_backend.core.errors import FaserError
from faser_backend.core.frontier import Frontier
from faser_backend.core.ports import Clock
from faser_backend.core.request import SamplingParams
from faser_backend.core.sequence import Sequence
from faser_backend.core.tree import MOST_CHILDREN
from faser_backend.device.cuda import draft_levels, level_choice
from faser_backend.device.cuda.draft_loop import TorchDraftLoop
from faser_backend.device.cuda.level_choice import Level, Nodes
from faser_backend.device.cuda.runner import CudaRunner
from faser_backend.device.cuda.segment import CallBounds, PreparedCall
from faser_backend.manifest import ModelEngine
from faser_backend.pipeline.draft_tree import GrowingTree, ModelTreeCalls, Node, propose_trees, propose_trees_at_once
from faser_backend.pipeline.rows import DecodeBatch
from faser_backend.pipeline.timing import PhaseTimes
from faser_backend.policy.tree_choice import UNPRICED, child_log_chances, tree_law
from tests.fakes import CountingClock
from tests.harness import request
from tests.test_torch_draft_loop import KINDS, open_sampler
from tests.tiny_models import VOCAB_SIZE, write_checkpoint
from tests.torch_engines import open_torch_runner, write_torch_engine

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS = 4, 240, 11
RULES = [UNPRICED, TreeRule(0.02, 0.1), TreeRule(0.0, 0.0)]

# -- the choice of nodes -----------------------------------------------------------------------------


def offered_chances(rng: np.random.Generator, num_children: int) -> np.ndarray:
    """[C] falling log chances, many of them alike."""
    return child_log_chances(-np.sort(rng.integers(0, 4, (1, num_children)) / 2.0), 0.7).astype(np.float32)[0]


def host_tree(seed: int, wanted: int, num_children: int, rule: TreeRule) -> list[tuple[int, int, int, float]]:
    """(token, parent's cell, cell, log chance) of each node; what a node offers depends on its path."""
    tree = GrowingTree(wanted, rule)
    level = [tree.root]
    while level:
        offers = [offered(seed, node.path, num_children) for node in level]
        level = tree.grow(level, [(tokens.tolist(), chances.tolist()) for tokens, chances in offers])
    return [(n.path[-1], cast(Node, n.parent).cell, n.cell, n.log_chance) for n in tree.nodes]


def offered(seed: int, path: list[int], num_children: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, len(path), *path])
    return rng.permutation(VOCAB_SIZE)[:num_children], offered_chances(rng, num_children)


def device_trees(seeds: list[int], wanted: np.ndarray, num_children: int, rule: TreeRule) -> list[list[tuple]]:
    size = int(wanted.sum())
    words = level_choice.law_words(tree_law(wanted, rule, 0.7, num_children), size)
    law = level_choice.law_of(torch.from_numpy(words))
    nodes, level = level_choice.no_nodes(size, torch.device("cpu")), level_choice.anchors(law)
    num_run = torch.zeros(size, dtype=torch.int64)
    paths: dict[tuple[int, int], list[int]] = {(b, -1): [] for b in range(len(seeds))}
    while int(level.cu_rows[-1]):
        ids, chances = np.zeros((size, num_children), np.int64), np.zeros((size, num_children), np.float32)
        for row in range(int(level.cu_rows[-1])):
            b, cell = int(level.sequences[row]), int(level.cells[row])
            if cell >= 0:
                paths[b, cell] = [*paths[b, int(level.parents[row])], int(level.tokens[row])]
                seen = {c for c in range(64) if int(level.bits[row]) >> c & 1}
                assert len(seen) == len(paths[b, cell]) == int(level.depths[row]) and max(seen) == cell
            ids[row], chances[row] = offered(seeds[b], paths[b, cell], num_children)
        nodes = level_choice.with_children(nodes, level, torch.from_numpy(ids), torch.from_numpy(chances), law)
        cells, level = level_choice.next_level(nodes, num_run, law, size)
        nodes, num_run = nodes._replace(cells=cells), num_run + level.cu_rows.diff()
    return [tree_of(nodes, b) for b in range(len(seeds))]


def tree_of(nodes: Nodes, b: int) -> list[tuple]:
    columns = (nodes.tokens[b], nodes.parents[b], nodes.cells[b], nodes.log_chances[b])
    return [found for found in zip(*(c.tolist() for c in columns), strict=True) if found[-1] > -np.inf]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("num_children", [1, 3, 8])
def test_nodes_and_cells_are_those_of_the_host_s_choice_ties_included(num_children: int, rule: TreeRule) -> None:
    for seed, sizes in enumerate(([1, 5, 2], [63, 12], [7, 7, 30, 1])):
        seeds = [10 * seed + b for b in range(len(sizes))]
        expected = [host_tree(each, n, num_children, rule) for each, n in zip(seeds, sizes, strict=True)]
        assert device_trees(seeds, np.array(sizes), num_children, rule) == expected


def test_chances_are_the_host_s_but_for_last_bits() -> None:
    scores = -np.sort(-np.random.default_rng(0).normal(0, 3, (20, 8)).astype(np.float32), axis=1)
    for count in (1, 5, 8):
        given = torch.from_numpy(scores), torch.full((20,), 0.7, dtype=torch.float64), torch.full((20,), count)
        found = level_choice.child_log_chances(*given).numpy()
        np.testing.assert_allclose(found[:, :count], child_log_chances(scores[:, :count], 0.7), atol=1e-5)
        assert np.isneginf(found[:, count:]).all()


# -- with a model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelEngine, Path]:
    root = tmp_path_factory.mktemp("draft_levels")
    return write_torch_engine(write_checkpoint(root / "source"), root, exit_layers=(1,)), root


def open_runner(built: tuple[ModelEngine, Path]) -> CudaRunner:
    return open_torch_runner(*built, NUM_BLOCKS, BLOCK_SIZE)


class Drafting:
    """Sequences that wait for trees, and how many nodes each gets, maybe none."""

    def __init__(self, seed: int, size: int, most: int) -> None:
        rng = np.random.default_rng(seed)
        self.wanted = rng.integers(0, most + 1, size)
        self.wanted[0] = most
        lengths = rng.integers(2, 20, size)
        needed = -(-(lengths + self.wanted) // BLOCK_SIZE)
        blocks = iter(rng.permutation(NUM_BLOCKS).tolist())
        tables = np.zeros((MAX_SEQS, int(needed.max()) + 1), np.int64)
        self.sequences = []
        for b, slot in enumerate(rng.permutation(MAX_SEQS)[:size].tolist()):
            prompt = rng.integers(0, VOCAB_SIZE, int(lengths[b])).tolist()
            sequence = Sequence.from_request(request(str(b), prompt, 90), 0)
            sequence.slot = slot
            tables[slot, : needed[b]] = [next(blocks) for _ in range(needed[b])]
            self.sequences.append(sequence)
        self.batch = DecodeBatch(self.sequences, tables)


def calls_of(runner: CudaRunner) -> ModelTreeCalls:
    return ModelTreeCalls(cast(Any, runner), PhaseTimes(cast(Clock, CountingClock())))


def drafted_twice(built: Any, kinds: list[SamplingParams], rule: TreeRule, seeds: int) -> list[tuple]:
    """Frontiers and pools of the host's levels, and of the device's, with one loop for all."""
    runner, host, sampler = open_runner(built), open_runner(built), open_sampler((kinds * MAX_SEQS)[:MAX_SEQS])
    loop, found = TorchDraftLoop(runner, sampler), []
    for seed in range(seeds):
        drafting = Drafting(seed, 1 + seed * 3 % MAX_SEQS, (1, 9, 40, 4, 16)[seed % 5])
        for each in (runner, host):
            each.pool.storage.zero_()
        expected = propose_trees(calls_of(host), sampler, drafting.batch, drafting.wanted, rule)
        drawn = propose_trees_at_once(calls_of(runner), loop, drafting.batch, drafting.wanted, rule)
        found.append((drawn, expected, runner.pool.storage.clone(), host.pool.storage.clone()))
    return found


def nodes_of(frontier: Frontier) -> list[list[tuple]]:
    tree = frontier.tree
    assert tree is not None
    arrays = (frontier.drafted, tree.parents, tree.draft_cells)
    counts = frontier.num_drafted.tolist()
    return [list(zip(*(a[b, :n].tolist() for a in arrays), strict=True)) for b, n in enumerate(counts)]


@pytest.mark.parametrize("rule", RULES[:2], ids=str)
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[:2], KINDS], ids=["greedy", "temperature", "filters"])
def test_trees_are_those_of_the_host_s_levels(built: Any, kinds: list[SamplingParams], rule: TreeRule) -> None:
    """Tokens, parents, cells and chances of sequences that want different sizes; and not a cell more is written."""
    for drawn, expected, pool, host_pool in drafted_twice(built, kinds, rule, 5):
        assert nodes_of(drawn) == nodes_of(expected)
        for b, count in enumerate(expected.num_drafted.tolist()):
            chances = (cast(Any, each.tree).log_chances[b, :count] for each in (drawn, expected))
            np.testing.assert_allclose(*chances, atol=1e-4)
        torch.testing.assert_close(pool, host_pool, atol=1e-4, rtol=0)


def siblings_seen(nodes: Nodes, num_run: torch.Tensor, law: Any, num_rows: int) -> tuple[torch.Tensor, Level]:
    cells, level = level_choice.next_level(nodes, num_run, law, num_rows)
    return cells, level._replace(bits=torch.where(level.bits > 0, (2 << level.cells) - 1, 0))


def shallow_positions(nodes: Nodes, *given: Any) -> tuple[torch.Tensor, Level]:
    cells, level = level_choice.next_level(nodes, *given)
    return cells, level._replace(depths=level.depths.clamp(max=1))


@pytest.mark.parametrize("mistake", [siblings_seen, shallow_positions])
def test_mistakes_are_noticed(built: Any, mistake: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that see their siblings, and nodes that lie, and draw, at depth 1."""
    monkeypatch.setattr(draft_levels, "next_level", mistake)
    assert any(
        nodes_of(drawn) != nodes_of(expected) for drawn, expected, *_ in drafted_twice(built, KINDS, RULES[1], 3)
    )


def test_a_proposal_of_as_many_levels_as_the_last_one_waits_once(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it needs more it waits for each; where it needs fewer the others change nothing."""
    waits: list[int] = []
    to_host = draft_levels.to_host
    monkeypatch.setattr(draft_levels, "to_host", lambda *tensors: waits.append(1) or to_host(*tensors))
    runner = open_runner(built)
    loop = TorchDraftLoop(runner, open_sampler(KINDS[:1] * MAX_SEQS))
    deep, flat = Drafting(1, 2, 30), Drafting(1, 2, 1)
    found = []
    for drafting in (deep, deep, flat, deep):
        waits.clear()
        frontier = propose_trees_at_once(calls_of(runner), loop, drafting.batch, drafting.wanted, RULES[1])
        found.append((nodes_of(frontier), len(waits)))
    assert found[0][0] == found[1][0] == found[3][0] and found[3][1] > 1
    assert [found[1][1], found[2][1]] == [1, 1]


def test_who_is_left_to_the_host(built: Any) -> None:
    runner = open_runner(built)
    kinds = [*KINDS[:3], SamplingParams(temperature=1.0, repetition_penalty=1.2)]
    loop = TorchDraftLoop(runner, open_sampler(kinds))
    few = np.array([5, 5])
    assert loop.can_draft_trees(np.array([0, 1]), few)
    assert not loop.can_draft_trees(np.array([0, 3]), few), "rules need the tokens before each draw"
    assert not loop.can_draft_trees(np.zeros(9, np.int64), np.full(9, 63)), "more rows than any graph has"
    limited = open_torch_runner(*built, NUM_BLOCKS, BLOCK_SIZE, limits=CallBounds(64, 6, 8, 10, 6, 0))
    told = TorchDraftLoop(limited, open_sampler(KINDS))
    assert not told.can_draft_trees(np.array([0, 1]), few), "programs that the host tells which rows are whose"
    drafting = Drafting(0, 1, 3)
    law = tree_law(drafting.wanted, UNPRICED, 0.7, MOST_CHILDREN + 1)
    with pytest.raises(ValueError, match=r"num_children = 9: must be in \[1, 8\]"):
        loop.draft_trees(calls_of(runner).unseen_rows(drafting.batch, np.array([0])), drafting.batch.slots, law)


def test_a_warmed_up_menu_leaves_pools_alone_and_has_every_shape(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = open_runner(built)
    monkeypatch.setattr("faser_backend.device.cuda.call_shapes.ROW_COUNTS", (1, 2, 8))
    runner.pool.storage.fill_(3.0)
    before = runner.pool.storage.clone()
    loop = TorchDraftLoop(runner, open_sampler(KINDS))
    loop.capture_menu(5, 2, has_trees=True)
    assert torch.equal(runner.pool.storage, before)
    assert {shape.bounds.num_rows for shape in loop._levels._levels.shapes} == {1, 2, 8}
    assert len(loop._levels._levels) == 3 * 2 and len(loop._chains) == 0
    runner.close()
    assert len(loop._levels._levels) == 0, "graphs that outlive their runner"


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_unusable_logits_name_their_slot_and_position(built: Any, kind: int) -> None:
    """Of the first sequence's second level, and of its anchor; rows of nobody may have any."""
    sampler, drafting = open_sampler(KINDS[kind : kind + 1] * MAX_SEQS), Drafting(2, 3, 12)
    slot, length = drafting.batch.slots[0], drafting.batch.num_tokens[0]

    def draft(runner: CudaRunner) -> None:
        loop = TorchDraftLoop(runner, sampler)
        propose_trees_at_once(calls_of(runner), loop, drafting.batch, drafting.wanted, RULES[1])

    with pytest.raises(FaserError, match=rf"slot {slot}, position {length + 2}\) hold NaN"):
        draft(with_nan(open_runner(built), 0, 2))
    draft(with_nan(open_runner(built), -1, 2))
    poisoned = open_runner(built)
    run_unseen = poisoned.run_unseen
    poisoned.run_unseen = lambda rows: (run_unseen(rows)[0].fill_(torch.nan), None)  # type: ignore[method-assign]
    with pytest.raises(FaserError, match=rf"slot {slot}, position {length}\) hold NaN"):
        draft(poisoned)


def with_nan(runner: CudaRunner, row: int, at_launch: int) -> CudaRunner:
    """Logits of `row` become NaN behind one launch."""
    prepare = runner.prepare_decode

    def prepare_decode(bounds: CallBounds) -> PreparedCall:
        call, launches = prepare(bounds), itertools.count(1)

        def launch() -> None:
            call.launch()
            if next(launches) == at_launch:
                call.tensors["logits"][row] = torch.nan

        return replace(call, launch=launch)

    runner.prepare_decode = prepare_decode  # type: ignore[method-assign]
    return runner
