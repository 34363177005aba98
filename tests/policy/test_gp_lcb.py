"""gp-lcb against a synthetic engine whose step times and acceptance rates are known.

Regret is time per token beside that of the best static length.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest

from faser_backend.core.decision import WHOLE
from faser_backend.core.sequence import Sequence
from faser_backend.policy.calibration import hats
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve, OverheadCost
from faser_backend.policy.gp_lcb import GpLcb, GridProcess, smooth
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, Knowledge
from tests.support.harness import guessed, request, step_record

LENGTHS = range(MAX_ADAPTIVE_TOKENS + 1)
NUM_OUTPUT_TOKENS = 200  # of a synthetic request; then the next one takes its place


def costs(draft_us: float, target_us: float, row_us: float, *, is_measured: bool = True) -> CostModel:
    """A draft call of fixed cost and 2 us per sequence; a target call of fixed cost and so much per row."""

    def call(fixed_us: float, per_row_us: float) -> tuple[CallCost]:
        flat = Curve(np.array([0.0, 1.0]), np.zeros(2))
        return (CallCost(Curve.from_slopes(np.array([0.0]), fixed_us, np.array([per_row_us])), flat),)

    segments = {(DRAFT, WHOLE): call(draft_us, 2.0), (TARGET, WHOLE): call(target_us, row_us)}
    return CostModel(segments, OverheadCost(50.0, 5.0, 2.0, 10.0, 1.0), np.zeros(1), is_measured=is_measured)


MEMORY_BOUND = costs(150.0, 1000.0, 15.0)
BETWEEN = costs(150.0, 800.0, 90.0)
COMPUTE_BOUND = costs(100.0, 200.0, 400.0)
GUESS = costs(60.0, 5000.0, 300.0, is_measured=False)


def step_us(engine: CostModel, lengths: list[int]) -> float:
    """The engine's true time of a serial step, call by call."""
    size, num_rows, total = len(lengths), len(lengths) + sum(lengths), 0.0
    for depth in range(1, max(lengths) + 1):
        deep = sum(length >= depth for length in lengths)
        total += float(engine.call_us(DRAFT, WHOLE, deep, deep, 100)) + float(engine.overhead.draft_call(deep))
    verify_us = engine.call_us(TARGET, WHOLE, num_rows, size, 100, max_rows=max(lengths) + 1)
    return total + float(verify_us) + float(engine.overhead.step(size, num_rows))


@dataclass(frozen=True)
class Load:
    """A stretch of steps in which nothing changes. Sequence b accepts with rates[b % len(rates)]."""

    num_steps: int
    size: int
    rates: tuple[float, ...]
    engine: CostModel

    def best_static_us(self) -> float:
        """Microseconds per token of the best length for all, in expectation."""
        return min(step_us(self.engine, [k] * self.size) / self._tokens(k) for k in LENGTHS)

    def _tokens(self, length: int) -> float:
        each = [sum(rate**kept for kept in range(length + 1)) for rate in self.rates]
        return self.size * sum(each) / len(each)


@dataclass
class Run:
    """Drives a policy through loads; requests are replaced as they end."""

    policy: GpLcb
    seed: int = 0
    noise: float = 0.1  # standard deviation of the log of a step's time
    sequences: list[Sequence] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)  # of every step

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def regret(self, load: Load) -> float:
        """Time per token over that of the best static length, minus 1."""
        total_us = num_emitted = 0.0
        del self.sequences[load.size :]
        for _ in range(load.num_steps):
            self._replace_ended(load.size)
            lengths = self.policy.decide(self.sequences).num_draft_tokens
            rates = [load.rates[b % len(load.rates)] for b in range(load.size)]
            accepted = [self._num_accepted(*pair) for pair in zip(rates, lengths, strict=True)]
            us = step_us(load.engine, lengths) * float(np.exp(self.rng.normal(0.0, self.noise)))
            for sequence, kept, length in zip(self.sequences, accepted, lengths, strict=True):
                sequence.num_tokens += kept + 1
                sequence.stats.num_tested += min(kept + 1, length)
                sequence.stats.num_accepted += kept
            self.policy.observe(step_record(list(self.sequences), lengths, accepted, us=us))
            self.lengths.append(lengths)
            total_us += us
            num_emitted += sum(accepted) + load.size
        return total_us / num_emitted / load.best_static_us() - 1.0

    def _num_accepted(self, rate: float, length: int) -> int:
        return int(np.append(self.rng.random(length) >= rate, True).argmax())

    def _replace_ended(self, size: int) -> None:
        for b, sequence in enumerate(self.sequences):
            if sequence.num_output_tokens >= NUM_OUTPUT_TOKENS:
                self.sequences[b] = new_sequence()
        self.sequences += [new_sequence() for _ in range(size - len(self.sequences))]

    def share_of_zeros(self, num_last: int) -> float:
        return float((np.array(self.lengths[-num_last:]) == 0).mean())


def new_sequence() -> Sequence:
    return Sequence.from_request(request("r", [1, 2, 3], 300), 0)


STATIONARY = {
    "one request, good drafts": Load(500, 1, (0.8,), MEMORY_BOUND),
    "one request, bad drafts": Load(500, 1, (0.1,), MEMORY_BOUND),
    "eight alike": Load(400, 8, (0.6,), BETWEEN),
    "eight mixed": Load(400, 8, (0.9, 0.3), BETWEEN),
    "compute-bound": Load(300, 32, (0.6,), COMPUTE_BOUND),
    "large and mixed": Load(250, 32, (0.9, 0.3), MEMORY_BOUND),
}


@pytest.mark.parametrize("load", STATIONARY.values(), ids=STATIONARY.keys())
def test_regret_is_small_where_the_costs_are_known(load: Load):
    assert Run(GpLcb(Knowledge(load.engine))).regret(load) < 0.08


@pytest.mark.parametrize("load", STATIONARY.values(), ids=STATIONARY.keys())
def test_regret_fades_where_the_costs_were_guessed_wrongly(load: Load):
    run = Run(GpLcb(Knowledge(GUESS)))
    run.regret(load)
    assert run.regret(load) < 0.15


def test_the_process_learns_what_the_costs_have_wrong():
    """Without the process the policy would trust free drafts for ever; with it, time teaches it."""
    too_cheap = costs(20.0, 3000.0, 20.0)
    load = Load(300, 32, (0.6,), COMPUTE_BOUND)
    learning, trusting = Run(GpLcb(Knowledge(too_cheap))), Run(GpLcb(Knowledge(too_cheap)))
    trusting.policy._process.observe = lambda weights, value: None  # type: ignore[method-assign]
    for run in (learning, trusting):
        run.regret(load)
    assert learning.regret(load) < 0.1
    assert trusting.regret(load) > 0.4


def test_mixed_requests_do_better_than_any_static_length():
    """As lengths follow each request."""
    run = Run(GpLcb(Knowledge(BETWEEN)))
    assert run.regret(Load(400, 8, (0.9, 0.3), BETWEEN)) < -0.005
    lengths = np.array(run.lengths[-100:])  # [100, 8]
    assert lengths[:, ::2].mean() > lengths[:, 1::2].mean() + 1.0


def test_drafting_returns_when_acceptance_does():
    good, bad = Load(500, 8, (0.85,), BETWEEN), Load(500, 8, (0.05,), BETWEEN)
    run = Run(GpLcb(Knowledge(BETWEEN)))
    run.regret(good)
    assert run.regret(bad) < 0.12
    assert run.share_of_zeros(200) > 0.9
    run.regret(good)
    assert run.share_of_zeros(100) < 0.1


def test_drafting_returns_when_the_load_goes():
    run = Run(GpLcb(Knowledge(BETWEEN)))
    quiet, busy = Load(200, 1, (0.8,), BETWEEN), Load(200, 32, (0.8,), COMPUTE_BOUND)
    regrets = [run.regret(load) for load in (quiet, busy, quiet, busy, quiet)]
    assert max(regrets[2:]) < 0.12
    assert run.share_of_zeros(100) < 0.1


def test_a_change_of_the_engine_is_noticed():
    """The same requests, but rows become expensive, which only measured times show."""
    run = Run(GpLcb(Knowledge(MEMORY_BOUND)))
    run.regret(Load(400, 8, (0.8,), MEMORY_BOUND))
    before = np.mean(run.lengths[-100:])
    run.regret(Load(600, 8, (0.8,), COMPUTE_BOUND))
    assert np.mean(run.lengths[-100:]) < 0.5 * before


@pytest.mark.parametrize("size", [1, 2, 3, 33, 256, 300])
def test_any_batch_gets_lengths_in_range(size: int):
    policy, rng = GpLcb(guessed()), np.random.default_rng(size)
    sequences = [new_sequence() for _ in range(size)]
    for _ in range(12):
        lengths = policy.decide(sequences).num_draft_tokens
        assert len(lengths) == size and all(0 <= k <= MAX_ADAPTIVE_TOKENS for k in lengths)
        policy.observe(step_record(sequences, lengths, [int(rng.integers(k + 1)) for k in lengths], us=900.0 * size))


# -- the Gaussian process ---------------------------------------------------------------------------------


def test_the_posterior_is_that_of_a_gaussian_process_over_all_observations():
    """Against the textbook's formula with the kernel of TV-GP-UCB, k(x, x') (1 - e)^(|t - t'| / 2)."""
    knots, noise, drift = np.array([0.0, 1.0, 2.0, 4.0, 8.0]), 0.3, 0.02
    prior = 0.7**2 * smooth(knots, 2.0)
    rng = np.random.default_rng(5)
    weights = hats(knots, rng.uniform(0.0, 8.0, 60))  # [60, 5]
    values = rng.normal(0.0, 0.2, 60)
    process = GridProcess(prior, noise, drift)
    for row, value in zip(weights, values, strict=True):
        process.observe(row, float(value))
    times = np.arange(60)
    seen = weights @ prior @ weights.T * (1 - drift) ** (np.abs(times[:, None] - times) / 2) + noise**2 * np.eye(60)
    across = prior @ weights.T * (1 - drift) ** ((times[-1] - times) / 2)  # [5, 60]
    assert process.mean == pytest.approx(across @ np.linalg.solve(seen, values), abs=1e-9)
    assert process.covariance == pytest.approx(prior - across @ np.linalg.solve(seen, across.T), abs=1e-9)


def test_the_posterior_stays_sound_over_many_steps():
    rng = np.random.default_rng(0)
    process = GridProcess(smooth(np.arange(9.0), 2.0), 0.1, 0.003)
    for _ in range(5000):
        process.observe(hats(np.arange(9.0), rng.uniform(2.0, 3.0, 1))[0], float(rng.normal()))
    assert np.linalg.eigvalsh(process.covariance).min() > -1e-12
    assert process.covariance[8, 8] > 0.9
    assert process.covariance[2, 2] < 0.1


def test_one_wild_measurement_moves_little():
    calm, hit = (GridProcess(np.eye(1), 0.1, 0.0) for _ in range(2))
    for value in [0.0] * 10:
        calm.observe(np.ones(1), value)
        hit.observe(np.ones(1), value)
    hit.observe(np.ones(1), 50.0)
    assert abs(hit.mean[0] - calm.mean[0]) < 0.1
