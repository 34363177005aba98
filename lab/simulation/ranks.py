"""Which of the draft's best tokens the target draws where it does not draw the best one, and how far these lie apart.

Both go by the margin of the draft's best token: shares of the ranks, and means of the leads over further tokens. Fitted
by python -m lab.simulation.fit_ranks to the demo pair at temperature 0.8. Under sample-and-match a rank, like a match,
is a property of the text's position; how many draft tokens of a tree lead there does not matter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

import numpy as np

from faser_backend.core.tree import MOST_CHILDREN
from faser_backend.policy.calibration import margin_bins

RANKS_FILE = "ranks_demo.json"


@dataclass(frozen=True, slots=True, eq=False)
class RankLaw:
    """By bin of the margin (M bins) and rank, C = MOST_CHILDREN; rank 0 is the draft's best token.

    shares [M, C]: of positions where the target's token is not of rank 0, those where its rank is 1, ..., C - 1; in the
    last column those where it is none of these. leads [M, C]: of the draft's second best over its rank k, in logits.
    """

    shares: np.ndarray
    leads: np.ndarray

    def draw(self, rng: np.random.Generator, margins: np.ndarray, is_match: np.ndarray) -> np.ndarray:
        """[n] ranks of the target's tokens at positions with margins [n]; C: beyond the draft's C best."""
        cumulated = self.shares.cumsum(axis=1)[margin_bins(margins)]
        ranks = 1 + (rng.random(margins.size)[:, None] >= cumulated[:, :-1]).sum(axis=1)
        return np.where(is_match, 0, ranks)

    def scores(self, margins: np.ndarray) -> np.ndarray:
        """[n, C] scores of the draft's best tokens at positions with margins [n], the best one's at 0."""
        scores = -margins[:, None] - self.leads[margin_bins(margins)]
        scores[:, 0] = 0.0
        return scores.astype(np.float32)

    @classmethod
    def fitted(cls, margins: np.ndarray, ranks: np.ndarray, scores: np.ndarray) -> RankLaw:
        """margins [n], ranks [n] in [0, C], scores [n, C] of the draft's best tokens. A bin with few positions leans
        on all others."""
        bins, num_bins = margin_bins(margins), margin_bins(np.array([np.inf]))[0] + 1
        misses = ranks > 0
        counts = np.zeros((num_bins, MOST_CHILDREN))
        np.add.at(counts, (bins[misses], ranks[misses] - 1), 1.0)
        overall = counts.sum(axis=0) / counts.sum()
        shares = (counts + _PRIOR * overall) / (counts.sum(axis=1, keepdims=True) + _PRIOR)
        leads = np.minimum(scores[:, 1:2] - scores, _MOST_LEAD)
        leads[:, 0] = 0.0
        sums = np.zeros((num_bins, MOST_CHILDREN))
        np.add.at(sums, bins, leads)
        sizes = np.bincount(bins, minlength=num_bins)[:, None]
        return cls(shares, (sums + _PRIOR * leads.mean(axis=0)) / (sizes + _PRIOR))


_PRIOR = 20.0  # positions
_MOST_LEAD = 50.0  # logits, of tokens that are forbidden


def demo_ranks() -> RankLaw:
    """The demo pair's, at temperature 0.8."""
    found = json.loads(resources.files("lab.simulation").joinpath(RANKS_FILE).read_text())
    return RankLaw(np.array(found["shares"]), np.array(found["leads"]))
