"""Which draft tokens trees are made of, chosen on a device: what pipeline/draft_tree.py and policy/tree_choice.py do on
the host, for all sequences at once.

Nodes of a sequence lie by falling chance; at equal chances those that were known before, then by their parent's row and
their rank. Chances within a node are of float32, along paths of float64, as on the host, whose logarithms may differ in
their last bits. Nothing here waits for the device and no shape depends on values: all of it may be captured in a graph.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from faser_backend.core.tree import MAX_TREE_TOKENS, TreeLaw

LAW_WORDS = 7
NO_FAULT = 2**62
FAULTS = (np.nan, np.inf, -np.inf)  # best scores of rows whose logits are unusable, by their number


class DeviceLaw(NamedTuple):
    """core.tree.TreeLaw of B sequences on the device; num_wanted 0: of nobody."""

    num_wanted: torch.Tensor  # [B] int64
    num_children: torch.Tensor  # [B] int64
    difference: torch.Tensor  # [B] float64, as all that follow
    node_bar: torch.Tensor
    run_bar: torch.Tensor
    lead: torch.Tensor
    level_chance: torch.Tensor


class Nodes(NamedTuple):
    """The nodes that are known of B sequences, M = MAX_TREE_TOKENS columns; past a sequence's own no meaning."""

    log_chances: torch.Tensor  # [B, M] float64; -inf: no node
    tokens: torch.Tensor  # [B, M] int64, as all that follow
    parents: torch.Tensor  # cell of the parent; -1: the anchor
    depths: torch.Tensor  # 1: behind the anchor
    cells: torch.Tensor  # -1: not run
    above: torch.Tensor  # bits of the ancestors' cells


class Level(NamedTuple):
    """Rows of one call, T at most, sequence-major: nodes, or the anchors. Past cu_rows[B] nobody's."""

    cu_rows: torch.Tensor  # [B + 1] int64
    sequences: torch.Tensor  # [T] int64, as all that follow but log_chances
    tokens: torch.Tensor
    depths: torch.Tensor  # 0: the anchor
    cells: torch.Tensor  # -1: the anchor
    parents: torch.Tensor  # cell, as of Nodes
    bits: torch.Tensor  # of the cells that a row sees, its own included; 0: the anchor
    log_chances: torch.Tensor  # [T] float64


def law_words(law: TreeLaw, num_columns: int) -> np.ndarray:
    """[LAW_WORDS, num_columns] int64, in bits what `law_of` reads; columns past law.num_wanted [A] are nobody's."""
    words = np.zeros((LAW_WORDS, num_columns), np.int64)
    words[0, : law.num_wanted.size] = law.num_wanted
    words[1] = law.num_children
    numbers = words[2:].view(np.float64)
    numbers[0], numbers[1] = law.difference, law.node_bar
    numbers[2, : law.num_wanted.size] = law.run_bars
    numbers[3], numbers[4] = law.lead, law.level_chance
    return words


def law_of(words: torch.Tensor) -> DeviceLaw:
    """Views of words [LAW_WORDS, B] int64."""
    return DeviceLaw(words[0], words[1], *(row.view(torch.float64) for row in words[2:]))


def no_nodes(num_sequences: int, device: torch.device) -> Nodes:
    """Of B sequences; tensors of their own."""
    shape = (num_sequences, MAX_TREE_TOKENS)
    words = [torch.full(shape, filler, dtype=torch.int64, device=device) for filler in (0, -1, 0, -1, 0)]
    return Nodes(torch.full(shape, -torch.inf, dtype=torch.float64, device=device), *words)


def anchors(law: DeviceLaw) -> Level:
    """Row b is the anchor of sequence b; those of nobody come last."""
    sequences = torch.arange(law.num_wanted.numel(), device=law.num_wanted.device)
    zeros, none = torch.zeros_like(sequences), torch.full_like(sequences, -1)
    log_chances = torch.zeros_like(law.difference)
    return Level(cu_of(law.num_wanted > 0), sequences, zeros, zeros, none, none, zeros, log_chances)


def cu_of(counts: torch.Tensor) -> torch.Tensor:
    """[B + 1] int64 prefix sums of counts [B]."""
    zero = torch.zeros(1, dtype=torch.int64, device=counts.device)
    return torch.cat([zero, counts.cumsum(0)])


def child_log_chances(scores: torch.Tensor, difference: torch.Tensor, num_children: torch.Tensor) -> torch.Tensor:
    """[T, C] float32 of the best num_children [T] tokens, -inf of others; scores [T, C] float32 in logits, falling;
    difference [T]. See policy/tree_choice.py."""
    scores = scores / difference.float()[:, None]
    scores = scores - scores[:, :1]
    columns = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill(columns >= num_children[:, None], -torch.inf)
    return scores - scores.exp().sum(dim=1, keepdim=True).log()


def with_children(nodes: Nodes, level: Level, ids: torch.Tensor, chances: torch.Tensor, law: DeviceLaw) -> Nodes:
    """The likeliest law.num_wanted of the nodes and of the children of a level's rows: ids [T, C], and log chances
    [T, C] behind their parents."""
    num_rows, num_children = ids.shape
    size = nodes.tokens.shape[1]
    columns = torch.arange(size, device=ids.device)
    totals = level.log_chances[:, None] + chances.double()
    is_worth = totals > law.node_bar[:1]
    is_worth[:, 0] |= level.cells < 0  # the best child of the anchor
    totals = totals.masked_fill(~is_worth, -torch.inf)
    counts = level.cu_rows.diff()
    rows = (level.cu_rows[:-1, None] + columns).clamp(max=num_rows - 1)  # [B, M] of a sequence's share of the level
    offered = totals[rows].masked_fill((columns >= counts[:, None])[:, :, None], -torch.inf)  # [B, M, C]
    known = torch.cat([nodes.log_chances, offered.flatten(1)], dim=1)
    known, order = known.sort(dim=1, descending=True, stable=True)
    best, order = known[:, :size], order[:, :size]
    best = best.masked_fill(columns >= law.num_wanted[:, None], -torch.inf)

    is_new, old = order >= size, order.clamp(max=size - 1)
    place = (order - size).clamp(min=0)
    parent = rows.gather(1, place // num_children)
    made = (
        ids.flatten()[parent * num_children + place % num_children],
        level.cells[parent],
        level.depths[parent] + 1,
        torch.full_like(parent, -1),
        level.bits[parent],
    )
    kept = (words.gather(1, old) for words in nodes[1:])
    return Nodes(best, *(torch.where(is_new, new, was) for new, was in zip(made, kept, strict=True)))


def next_level(nodes: Nodes, num_run: torch.Tensor, law: DeviceLaw, num_rows: int) -> tuple[torch.Tensor, Level]:
    """The nodes whose children could be among the best of the tree, as policy/tree_choice.py has them: cells of all
    nodes [B, M] from now on, and rows, num_rows at most. num_run: [B] cells that are taken."""
    size = nodes.tokens.shape[1]
    wanted = law.num_wanted[:, None]
    least = nodes.log_chances.gather(1, (wanted - 1).clamp(min=0))  # -inf of a tree that is not full
    bars = torch.maximum(law.run_bar[:, None], least) + law.lead[:, None]
    is_next = (nodes.log_chances >= bars) & (nodes.cells < 0)
    weight = torch.where(is_next, nodes.log_chances.exp(), 0.0).sum(dim=1)
    is_next &= (weight >= law.level_chance)[:, None]
    cells = num_run[:, None] + is_next.cumsum(1) - 1
    is_next &= cells < wanted
    cu_rows = cu_of(is_next.sum(dim=1))
    # Which node a row is; what is none goes to one row more.
    rows = torch.where(is_next, cu_rows[:-1, None] + cells - num_run[:, None], num_rows)
    source = torch.zeros(num_rows + 1, dtype=torch.int64, device=rows.device)
    source.scatter_(0, rows.flatten(), torch.arange(rows.numel(), device=rows.device))
    source = source[:num_rows]
    cells = torch.where(is_next, cells, nodes.cells)
    is_row = torch.arange(num_rows, device=rows.device) < cu_rows[-1]
    own = torch.where(is_row, cells.flatten()[source], 0)
    level = Level(
        cu_rows,
        source // size,
        torch.where(is_row, nodes.tokens.flatten()[source], 0),
        nodes.depths.flatten()[source],
        own,
        nodes.parents.flatten()[source],
        torch.where(is_row, nodes.above.flatten()[source] | torch.ones_like(own) << own, 0),
        nodes.log_chances.flatten()[source],
    )
    return cells, level


def faults_of(best: torch.Tensor, level: Level) -> torch.Tensor:
    """[B] of the best score of each row [T]: depth * 3 + number in FAULTS of a sequence's shallowest row whose logits
    are unusable, or NO_FAULT."""
    kind = torch.where(best.isnan(), 0, torch.where(best > 0, 1, 2))
    found = (level.depths * 3 + kind).masked_fill(best.isfinite(), NO_FAULT)
    columns = torch.arange(MAX_TREE_TOKENS, device=best.device)
    rows = (level.cu_rows[:-1, None] + columns).clamp(max=best.numel() - 1)
    return found[rows].masked_fill(columns >= level.cu_rows.diff()[:, None], NO_FAULT).amin(dim=1)
