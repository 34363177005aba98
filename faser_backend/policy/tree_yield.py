"""What trees come to, from those that were verified: how likely their nodes are, which are kept, how deep they lie.

Nodes are counted by the chance that the draft gave them. A tree that is cut at a chance keeps what lies above it, so
that one tree teaches about all that are smaller. What a node of such a chance is worth is counted, and not believed.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.decision import PipelineMode, Score
from faser_backend.core.record import StepRecord
from faser_backend.policy.batch_times import BatchTimes

# Chances at which a tree may be cut, falling; nodes between two of them make a bin.
CUTS = np.array([0.7, 0.5, 0.35, 0.25, 0.18, 0.13, 0.09, 0.065, 0.045, 0.03])
FIRST_CUT = 0.09  # of trees that are looked at to learn what they come to
_MIDDLES = np.sqrt(CUTS * np.array([1.0, *CUTS[:-1]]))
_FADE = 0.998  # by tree: the last 500 count
_PRIOR = 8.0  # nodes that the draft's own word weighs, by bin
_FEW_TREES, _FEW_STEPS = 12.0, 2.9  # of which one is enough to know what a cut comes to: three steps fade a little
_TIMES_PRIOR = 4.0  # steps that the prediction of a draft phase weighs
CHILD_SHARE = 0.6  # of what lies behind a node, that its children in the tree catch: what a level brings for its call
_LEAST_LEVEL, _MOST_LEVEL = 0.05, 0.9


class TreeYield:
    """Of trees of up to `most_nodes` nodes a sequence, on the whole device."""

    def __init__(self, most_nodes: int) -> None:
        self.most_nodes = most_nodes
        # [5, G] by bin: trees, their nodes, kept nodes; steps, and the depths of the deepest nodes above the cut. A
        # tree that was cut above a bin shows none of its nodes, and is not among its trees.
        self._sums = np.zeros((5, CUTS.size))
        self._draft_us = (0.0, 0.0)  # faded sums: seen, predicted

    @property
    def is_known(self) -> bool:
        return bool(self._is_seen[0])

    def observe(self, record: StepRecord) -> None:
        """Learns from a step with trees."""
        tree, rule, path = record.frontier.tree, record.plan.decision.tree, record.acceptance.path
        if tree is None or rule is None or path is None or tree.log_chances is None:
            return
        is_own = record.frontier.num_drafted > 0
        if record.frontier.is_client is not None:
            is_own &= ~record.frontier.is_client
        if is_own.any():
            is_own &= ~np.isnan(tree.log_chances[:, 0])  # a chain that was in flight
        own = np.flatnonzero(is_own)
        if not own.size:
            return
        columns = np.arange(tree.parents.shape[1])
        is_node = columns < record.frontier.num_drafted[own, None]
        bins = np.searchsorted(-CUTS, -np.exp(tree.log_chances[own]))  # [n, K]; nodes below the last cut: CUTS.size
        steps = np.arange(path.rows.shape[1] - 1)
        is_kept = np.zeros(is_node.shape, np.bool_)
        row, step = np.nonzero(steps < record.acceptance.num_accepted[own, None])
        is_kept[row, path.rows[own[row], 1 + step] - 1] = True
        is_drafted = is_node & ~record.frontier.is_look_up[own, None]  # by draft calls
        depths = np.where(is_drafted, tree.lines.depths[own, 1:], 0)
        is_shown = rule.min_chance <= CUTS
        nodes, kept = (np.bincount(bins[each], minlength=CUTS.size + 1)[: CUTS.size] for each in (is_node, is_kept))
        deepest = np.array([depths[bins <= index].max(initial=0) for index in range(CUTS.size)])
        seen = np.stack([np.full(CUTS.size, own.size), nodes, kept, np.ones(CUTS.size), deepest])
        self._sums *= np.where(is_shown, _FADE**own.size, 1.0)
        self._sums += seen * is_shown

    def observe_time(self, record: StepRecord, times: BatchTimes) -> None:
        """Holds the step's draft phase against what is predicted of a call for each level of its trees."""
        tree = record.frontier.tree
        if tree is None or not record.propose_us:
            return
        num_drafted = np.where(record.frontier.is_look_up, 0, record.frontier.num_drafted)
        is_node = np.arange(tree.parents.shape[1]) < num_drafted[:, None]
        depth = int(np.where(is_node, tree.lines.depths[:, 1:], 0).max(initial=0))
        num_trees = int(np.count_nonzero(num_drafted))
        if not num_trees:
            return
        seen, predicted = self._draft_us
        fade = 1.0 - 1.0 / 64
        predicted_us = times.draft_round_us + depth * float(times.draft_us[num_trees])
        self._draft_us = fade * seen + record.propose_us, fade * predicted + predicted_us

    def by_cut(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What trees that end at each of CUTS come to, [G] each: nodes of a tree, kept ones of these, and the depth of
        a step's deepest node."""
        trees, nodes, kept, steps, depths = self._sums
        chances = (kept + _PRIOR * _MIDDLES) / (nodes + _PRIOR)
        per_tree = nodes / np.maximum(trees, 1.0)
        deepest = np.maximum.accumulate(depths / np.maximum(steps, 1.0))
        return per_tree.cumsum(), (per_tree * chances).cumsum(), deepest

    def score(self, times: BatchTimes) -> Score:
        """The best cut for a batch, and what its trees come to; `is_known` must hold."""
        size, (num_nodes, num_kept, depths) = times.size, self.by_cut()
        num_rows = np.minimum(size * num_nodes, times.verify_us.size - 1)
        num_kept = size * num_kept
        draft_us = (times.draft_round_us + depths * times.draft_us[size]) * self._draft_ratio(times)
        step_us = np.interp(num_rows, np.arange(times.verify_us.size), times.verify_us) + draft_us
        best = int(np.where(self._is_seen, (size + num_kept) / step_us, 0.0).argmax())
        return Score(
            PipelineMode.SERIAL,
            times.partition,
            self.most_nodes,
            float(CUTS[best]),
            float(num_rows[best]),
            float(num_kept[best]),
            size + float(num_kept[best]),
            float(step_us[best]),
            is_tree=True,
        )

    def level_chance(self, times: BatchTimes, tokens_per_us: float) -> float:
        """From which on a level is worth its call, of one sequence among `times.size`, at a price of time."""
        us = float(times.draft_us[times.size]) / times.size * self._draft_ratio(times)
        return min(max(us * tokens_per_us / CHILD_SHARE, _LEAST_LEVEL), _MOST_LEVEL)

    def unknown_score(self, times: BatchTimes, chains: Score) -> Score:
        """Stands for trees that nobody has seen yet: the tokens of chains, with the rows of whole trees."""
        num_rows = times.size * self.most_nodes
        rows_us = float(
            times.verify_us[num_rows] - np.interp(chains.num_rows, np.arange(times.verify_us.size), times.verify_us)
        )
        return chains._replace(
            num_draft_tokens=self.most_nodes,
            floor=FIRST_CUT,
            num_rows=float(num_rows),
            step_us=chains.step_us + max(rows_us, 0.0),
            is_tree=True,
        )

    @property
    def _is_seen(self) -> np.ndarray:
        """[G] bool: enough trees went down to each cut."""
        return (self._sums[0] >= _FEW_TREES) | (self._sums[3] >= _FEW_STEPS)

    def _draft_ratio(self, times: BatchTimes) -> float:
        seen, predicted = self._draft_us
        prior = _TIMES_PRIOR * float(times.draft_us[times.size])
        return (seen + prior) / (predicted + prior)
