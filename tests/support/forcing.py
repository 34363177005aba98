"""Forced decisions: a policy whose decisions a test changes, and pruners.

Exactness must not depend on decisions, so these force every mode, length, trim rule and pruner.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from faser_backend.core.decision import WHOLE, Decision, ExitView, PipelineMode, Pruner, TrimRule
from faser_backend.core.plan import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import MatchCalibration, logits
from faser_backend.policy.early_exit import EarlyExit, ExitCalibration
from faser_backend.policy.speculation import SpeculationPolicy
from tests.support.harness import SPLIT

Change = Callable[[Decision], Decision]


class Forced:
    """Another policy with `change` applied to all of its decisions."""

    def __init__(self, inner: SpeculationPolicy, change: Change) -> None:
        self.is_drafting = inner.is_drafting
        self.partitions: tuple[str, ...] = (WHOLE, SPLIT)
        self.inner = inner
        self._change = change

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        return self._change(self.inner.decide(sequences, num_prefilling))

    def observe(self, record: StepRecord) -> None:
        self.inner.observe(record)


def forced(mode: PipelineMode = PipelineMode.SERIAL, **fields) -> Change:
    """Sets the mode, on a partition that allows it, and any other field of a decision."""
    partition = WHOLE if mode is PipelineMode.SERIAL else SPLIT
    return lambda decision: replace(decision, mode=mode, partition=partition, **fields)


def in_turns(*lengths: int) -> Change:
    """Sets one length for all sequences, another one each step."""
    turns = itertools.cycle(lengths)
    return lambda decision: Decision([next(turns)] * len(decision.num_draft_tokens))


def random_everything(seed: int, *, longest: int = 6, most_candidates: int = 5) -> Change:
    """Draws every field of every decision, each step. An inner policy that does not draft stays plain."""
    rng = np.random.default_rng(seed)

    def change(decision: Decision) -> Decision:
        size = len(decision.num_draft_tokens)
        lengths = rng.integers(0, longest + 1, size) if any(decision.num_draft_tokens) else np.zeros(size, np.int64)
        modes = list(PipelineMode)
        mode = modes[int(rng.integers(len(modes)))]
        partition = WHOLE if mode is PipelineMode.SERIAL and rng.random() < 0.5 else SPLIT
        trim = random_rule(rng) if rng.random() < 0.5 else None
        pruner = random_pruner(rng, most_candidates) if rng.random() < 0.6 else None
        return Decision(lengths.tolist(), mode, partition, trim, pruner, prefills_draft=bool(rng.random() < 0.6))

    return change


def random_lengths(seed: int, mode: PipelineMode, *, longest: int = 6) -> Change:
    """Sets the mode, and draws lengths for each request and step."""
    rng = np.random.default_rng(seed)
    force = forced(mode)

    def change(decision: Decision) -> Decision:
        size = len(decision.num_draft_tokens)
        return replace(force(decision), num_draft_tokens=rng.integers(0, longest + 1, size).tolist())

    return change


def alternating(*changes: Change) -> Change:
    """Alternates between changes from step to step."""
    turn = itertools.cycle(changes)

    def change(decision: Decision) -> Decision:
        return next(turn)(decision)

    return change


# -- trim rules --------------------------------------------------------------------------------------


def rule(
    probs: Sequence[float],
    verify_us: Sequence[float],
    *,
    draft_us: float = 0.0,
    price: float = 0.0,
    first_knot: float = 0.0,
    knot_step: float = 1.0,
) -> TrimRule:
    """Returns a rule with chances `probs` at evenly spaced, equally frequent margins.

    price: tokens_per_us; a row costs the average of one row over verify_us.
    """
    size = len(probs)
    return TrimRule(
        margin_knots=first_knot + knot_step * np.arange(size),
        match_logits=logits(np.array(probs, np.float64)),
        margin_shares=np.full(size, 1 / size),
        offsets=np.zeros(1),
        verify_us=np.array(verify_us, np.float64),
        draft_us=np.full(65, draft_us),
        tokens_per_us=price,
        row_price=price * (verify_us[-1] - verify_us[0]) / max(len(verify_us) - 1, 1),
    )


ADMITS_ALL = rule([1.0, 1.0], [1.0, 1.0])
ADMITS_NOTHING = rule([0.5, 0.6], [1.0, 1e6], price=1e-7)  # a row costs far more than it gains, yet drafting continues


def random_rule(rng: np.random.Generator) -> TrimRule:
    """Draws any calibration, with times that rise in random steps as those of compiled shapes do."""
    size = int(rng.integers(2, 6))
    probs = np.sort(rng.random(size))
    steps = rng.exponential(1.0, int(rng.integers(1, 24))) * (rng.random() < 0.7)
    times = 1.0 + np.concatenate([[0.0], np.cumsum(np.where(rng.random(steps.size) < 0.4, steps, 0.0))])
    chosen = rule(probs.tolist(), times.tolist(), draft_us=float(rng.random() * 0.5), price=float(rng.random() * 0.5))
    return replace(chosen, offsets=rng.normal(0.0, 0.7, 64))


# -- pruners -----------------------------------------------------------------------------------------


class ByEntry:
    """Prunes row j and all after it if `lives(view)` [B, K] is False at [b, j - 1]."""

    def __init__(self, lives: Callable[[ExitView], np.ndarray], exits: Sequence[int] = (0,), num_candidates: int = 4):
        self.exits = frozenset(exits)
        self.num_candidates = num_candidates
        self._lives = lives

    def keep(self, view: ExitView) -> np.ndarray:
        lives = self._lives(view)
        never = np.zeros((lives.shape[0], 1), np.bool_)
        first_dead = np.concatenate([lives, never], axis=1).argmin(axis=1)
        return np.minimum(1 + first_dead, view.num_rows)


def at_random(rng: np.random.Generator, share: float = 0.7, **options) -> Pruner:
    return ByEntry(lambda view: rng.random(view.exit_margins.shape) < share, **options)


def always(**options) -> Pruner:
    """Keeps only the anchors."""
    return ByEntry(lambda view: np.zeros(view.exit_margins.shape, np.bool_), **options)


def by_parity(**options) -> Pruner:
    return ByEntry(lambda view: view.frontier.drafted % 2 == 0, **options)


def outside_top(margin: float = 0.0, **options) -> Pruner:
    """Prunes if another candidate leads at the exit by more than -margin logits."""
    return ByEntry(lambda view: view.exit_margins >= margin, **options)


def calibrated(threshold: float, *, segments: Sequence[int] = (0,), num_candidates: int = 8) -> Pruner:
    """Returns the policies' pruner under a guessed calibration of the fakes' exits."""
    exits = (ExitCalibration(s, s + 1, 0.5, 0.3, 0.5, threshold, 0.9, (0.2,), 0.9, 0.2) for s in segments)
    return EarlyExit(tuple(exits), MatchCalibration(None).curve, num_candidates=num_candidates)


def peeking(**options) -> Pruner:
    """Prunes row j by draft token j + 1, which is wrong: row j must not depend on it."""

    def lives(view: ExitView) -> np.ndarray:
        following = np.roll(view.frontier.drafted, -1, axis=1)
        is_known = np.arange(1, following.shape[1] + 1) < view.frontier.num_drafted[:, None]
        return ~is_known | (following % 2 == 0)

    return ByEntry(lives, **options)


def random_pruner(rng: np.random.Generator, most_candidates: int) -> Pruner:
    options = {
        "exits": [(0,), (1,), (0, 1)][int(rng.integers(3))],
        "num_candidates": int(rng.integers(2, most_candidates + 1)),
    }
    makers = [
        lambda: at_random(rng, **options),
        lambda: always(**options),
        lambda: by_parity(**options),
        lambda: outside_top(float(rng.normal()), **options),
    ]
    return makers[int(rng.integers(len(makers)))]()
