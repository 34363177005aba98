"""Calibration: chances by margin, and that what is fitted to is what an engine did."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from faser_backend.core.errors import ConfigError
from faser_backend.core.request import Limits
from faser_backend.manifest import EngineManifest
from faser_backend.policy.calibration import MARGIN_KNOTS, MarginCounts, MatchCalibration, margin_bins, rising_shares
from faser_backend.profiling.calibration import TOKENS_EACH, calibration_requests, record_chains, tokenised_prompts
from faser_backend.serving.compose import build_engine
from tests.support.tiny_models import build_with_draft


def true_chance(margins: np.ndarray) -> np.ndarray:
    return 1.0 - 0.7 * np.exp(-0.5 * margins)


# -- chances by margin --------------------------------------------------------------------------------------


def test_counts_fall_into_their_bins() -> None:
    counts = MarginCounts.of(np.array([-1.0, 0.0, 0.24, 0.25, 11.9, 400.0]), np.array([1, 0, 1, 1, 0, 1], np.bool_))
    assert counts.tested[[0, 1, 12, 13]].tolist() == [3, 1, 1, 1] and counts.tested.sum() == 6
    assert counts.accepted[[0, 1, 12, 13]].tolist() == [2, 1, 0, 1]


def test_predicted_chances_match_what_happens_in_every_bin() -> None:
    rng = np.random.default_rng(0)
    margins = rng.exponential(2.5, 200_000)
    is_accepted = rng.random(margins.size) < true_chance(margins)
    curve = MatchCalibration(MarginCounts.of(margins[::2], is_accepted[::2])).curve
    fresh, bins = margins[1::2], margin_bins(margins[1::2])

    def worst_error(predicted: np.ndarray) -> float:
        means = [predicted[bins == i].mean() - true_chance(fresh[bins == i]).mean() for i in range(10)]
        return float(np.abs(means).max())

    assert worst_error(curve.chances(fresh)) < 0.02
    assert worst_error(np.interp(fresh, MARGIN_KNOTS, curve.match_probs)) > 0.03, "chances held at bin starts"


@pytest.mark.parametrize("seed", range(3))
def test_more_margin_never_means_less_chance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tested = rng.integers(0, 5, MARGIN_KNOTS.size).astype(np.float64)
    curve = MatchCalibration(MarginCounts(tested, rng.integers(0, tested + 1).astype(np.float64))).curve
    chances = curve.chances(np.linspace(-1.0, 40.0, 500))
    assert (np.diff(chances) >= 0).all() and (chances >= 0).all() and (chances <= 1).all()
    assert curve.margin_shares.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(10))
def test_rising_shares_are_the_nearest_that_never_fall(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tested = rng.uniform(0.5, 20.0, 8)
    shares = rng.random(8)
    pools = [[share, weight, 1] for share, weight in zip(shares, tested, strict=True)]
    index = 0
    while index + 1 < len(pools):  # pool neighbours that fall, the textbook's way
        (a, u, n), (b, v, m) = pools[index : index + 2]
        if a <= b:
            index += 1
            continue
        pools[index : index + 2] = [[(a * u + b * v) / (u + v), u + v, n + m]]
        index = max(index - 1, 0)
    expected = np.concatenate([[share] * count for share, _, count in pools])
    assert rising_shares(shares * tested, tested) == pytest.approx(expected)


def observe(matches: MatchCalibration, margins: np.ndarray, num_accepted: np.ndarray, num_kept: np.ndarray) -> None:
    """Teaches chains of margins.shape[1] tokens each, of which num_kept - 1 were tested."""
    matches.observe(margins, num_accepted, np.minimum(num_accepted + 1, np.minimum(margins.shape[1], num_kept)))


def test_traffic_moves_the_chances() -> None:
    matches = MatchCalibration(None)
    margins = np.full((8, 4), 1.2, np.float32)
    before = matches.curve.chances(margins)[0, 0]
    for _ in range(3000):
        observe(matches, margins, np.zeros(8, np.int64), np.full(8, 5))
    assert before > 0.5 and matches.curve.chances(margins)[0, 0] < 0.05, "thin bins below must not lift this one"


def test_bins_that_traffic_has_left_keep_a_chance() -> None:
    matches = MatchCalibration(None)
    margins = np.full((32, 40), 1.2, np.float32)  # 1280 tests a step: the rest is forgotten within a thousand
    for _ in range(3000):
        observe(matches, margins, np.full(32, 40), np.full(32, 41))
    assert matches._tested[0] < 1e-300
    guessed = MatchCalibration(None).curve
    assert matches.curve.chances(np.zeros(1))[0] == pytest.approx(guessed.chances(np.zeros(1))[0])


def test_only_tokens_that_a_whole_row_tested_count() -> None:
    matches = MatchCalibration(None)
    start, first = matches._tested.copy(), matches.curve
    margins = np.array([[0.1, 1.2, 3.5, 6.5], [0.1, 1.2, 3.5, 6.5]], np.float32)
    # The first chain was rejected at its second token; of the second only two rows were left, which test two.
    observe(matches, margins, np.array([1, 2]), np.array([5, 2]))
    assert matches.curve is first, "4 tests are not yet worth a new fit"
    observe(matches, margins, np.array([1, 2]), np.array([5, 2]))
    gained = np.round(matches._tested - start * (1 - 8 / 2000), 6)
    assert gained[margin_bins(margins[0])].tolist() == [4, 4, 0, 0] and gained.sum() == 8


# -- what is recorded ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_with_draft(tmp_path_factory.mktemp("calibration"), exit_layers=(1, 2))


def test_recorded_chains_are_those_of_the_texts(engine: Path) -> None:
    manifest = EngineManifest.load(engine)
    rng = np.random.default_rng(0)
    requests = calibration_requests([], manifest.end_ids, Limits(97, 128), 7, rng)
    chains = record_chains(partial(build_engine, engine), frozenset({0, 1}), requests, 5)
    assert set(chains.exit_margins) == {0, 1} and set(chains.group.tolist()) == {0, 1}
    assert (chains.num_drafted >= 1).all() and (chains.num_accepted <= chains.num_drafted).all()
    # Every round emits what was accepted and one more; only a first and a last token are emitted without a draft.
    num_emitted = int((chains.num_accepted + 1).sum())
    assert 7 * (TOKENS_EACH - 2) <= num_emitted < 7 * TOKENS_EACH
    num_greedy = sum(each.sampling.is_greedy for _, each in requests)
    emitted = int((chains.num_accepted + 1)[~chains.is_sampled].sum())
    assert num_greedy == 4 and num_greedy * (TOKENS_EACH - 2) <= emitted < num_greedy * TOKENS_EACH
    assert (chains.margins[chains.is_drafted] >= 0).all() and (chains.margins[~chains.is_drafted] == 0).all()
    assert all((margins[chains.is_tested] != 0).all() for margins in chains.exit_margins.values())


@pytest.mark.parametrize(
    ("max_context", "num_prompts", "end_ids"), [(4, 0, ()), (16, 3, (3,)), (128, 0, (3,)), (2048, 3, ())]
)
def test_requests_are_valid_and_hold_out_half(max_context: int, num_prompts: int, end_ids: tuple[int, ...]) -> None:
    limits = Limits(97, max_context)
    prompts = [np.arange(90) for _ in range(num_prompts)]
    requests = calibration_requests(prompts, end_ids, limits, 24, np.random.default_rng(0))
    for _, request in requests:
        request.validate(limits)
    assert {group % 2 for group, _ in requests} == {0, 1} and len({r.request_id for _, r in requests}) == 24
    temperatures = {parity: sorted(r.sampling.temperature for g, r in requests if g % 2 == parity) for parity in (0, 1)}
    assert all(set(found) == {0.0, 0.8, 1.0} for found in temperatures.values())


def test_prompts_are_read_from_json_lines_and_from_text(engine: Path, tmp_path: Path) -> None:
    manifest = EngineManifest.load(engine)
    (tmp_path / "a.jsonl").write_text('{"prompt": "token5", "id": 1}\n\n{"prompt": "token7"}\n')
    (tmp_path / "a.txt").write_text("token5\n\ntoken7\n")
    for name in ("a.jsonl", "a.txt"):
        assert [ids.tolist() for ids in tokenised_prompts(tmp_path / name, engine, manifest)] == [[5], [7]]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", '{"prompt": "token5"}\n{"title": "token7"}', 'line 2: must be a JSON object with "turns"'),
        ("a.jsonl", '{"prompt": 7}\n', "line 1: prompt = 7: must be text"),
        ("a.txt", "token5\n", "1 prompts; at least 2"),
        ("a.txt", "", "holds no prompts"),
        ("missing.txt", None, "missing"),
    ],
)
def test_bad_prompts_are_named(engine: Path, tmp_path: Path, name: str, content: str | None, named: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=named) as caught:
        tokenised_prompts(tmp_path / name, engine, EngineManifest.load(engine))
    assert name in str(caught.value)
