"""TorchSampler against NumpySampler: equal noise, tokens, candidates and errors, margins to the last bits."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from faser_backend.core.batch import SamplingRows
from faser_backend.core.ports import NO_TOKEN, Sampler
from faser_backend.core.request import Sampling
from faser_backend.cpu.logits import keep_min_p as numpy_keep_min_p
from faser_backend.cpu.logits import keep_top as numpy_keep_top
from faser_backend.cpu.noise import GumbelNoise, seed_keys
from faser_backend.cpu.sampler import MAX_MARGIN, NumpySampler
from faser_backend.cuda import sampler as sampler_module
from faser_backend.cuda.sampler import TorchNoise, TorchSampler, keep_min_p, keep_top
from tests.cpu.test_sampler import VOCAB, Scene, one_row_each
from tests.support.torch_engines import CPU

KINDS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.7, seed=1),
    "top-k": Sampling(temperature=0.7, top_k=5, seed=2),
    "top-k of one": Sampling(temperature=0.7, top_k=1, seed=3),
    "top-p": Sampling(temperature=1.3, top_p=0.8, seed=4),
    "min-p": Sampling(temperature=1.3, min_p=0.1, seed=5),
    "all filters": Sampling(temperature=1.1, top_k=40, top_p=0.95, min_p=0.02, seed=6),
    "penalties": Sampling(temperature=0.9, repetition_penalty=1.3, seed=7),
    "rules, greedy": Sampling(logit_bias={3: 9.0}, bad_words=((1, 2), (4,))),
    "rules and filters": Sampling(temperature=0.9, top_p=0.7, min_tokens=3, frequency_penalty=0.5, seed=8),
}


def filled(sampler: Sampler, scene: Scene, sampling: list[Sampling]) -> Sampler:
    for b, slot in enumerate(scene.slots.tolist()):
        tokens = np.array(scene.committed[b], np.int64)
        sampler.add(slot, sampling[b], tokens, int(scene.num_prompt[b]), scene.end_ids[b])
    return sampler


def without_rules(sampling: Sampling) -> Sampling:
    """Returns temperature, filters and seed only."""
    kept = ("temperature", "top_k", "top_p", "min_p", "seed")
    return Sampling(**{name: getattr(sampling, name) for name in kept})


def both(vocab_size: int, *kinds: Sampling) -> tuple[NumpySampler, TorchSampler]:
    """Returns samplers of equal requests, one of each kind in the first slots."""
    num_slots = max(len(kinds), 8)
    samplers = NumpySampler(vocab_size, num_slots), TorchSampler(vocab_size, num_slots, CPU)
    for sampler in samplers:
        for slot, sampling in enumerate(kinds):
            sampler.add(slot, sampling, np.arange(2), 1, (0,))
    return samplers


def assert_equal_draws(
    host: NumpySampler, device: TorchSampler, logits: np.ndarray, rows: SamplingRows, num_candidates: int
) -> None:
    on_device = torch.from_numpy(logits.copy())
    assert np.array_equal(device.sample(on_device, rows), host.sample(logits, rows))
    expected = host.sample_draft(logits, rows, num_candidates)
    drawn = device.sample_draft(on_device, rows, num_candidates)
    assert np.array_equal(drawn.tokens, expected.tokens)
    assert drawn.margins.dtype == np.float32
    np.testing.assert_allclose(drawn.margins, expected.margins, rtol=1e-5, atol=1e-5)
    assert (drawn.candidates is None) == (expected.candidates is None)
    if drawn.candidates is not None and expected.candidates is not None:
        assert np.array_equal(drawn.candidates, expected.candidates)
    assert torch.equal(on_device, torch.from_numpy(logits)), "the caller's logits were written to"


def test_thousands_of_rows_of_all_kinds() -> None:
    num_plain = num_filtered = num_ruled = 0
    for seed in range(240):
        scene = Scene(seed)
        # Most slots of a scene have rules: most scenes get none.
        sampling = list(map(without_rules, scene.sampling)) if seed % 4 else scene.sampling
        host, device = both(VOCAB)
        filled(host, scene, sampling)
        filled(device, scene, sampling)
        assert_equal_draws(host, device, scene.logits, scene.rows, seed % 6)
        device.check_integrity()
        known, slots = device.parameters, scene.rows.slots
        num_ruled += np.count_nonzero(known.has_rules[slots])
        num_filtered += np.count_nonzero(known.has_filters[slots] & ~known.has_rules[slots])
        num_plain += np.count_nonzero(~(known.has_rules | known.has_filters)[slots])
    assert min(num_plain, num_filtered, num_ruled) > 300


@pytest.mark.parametrize("vocab_size", [1001, 2048])
def test_wide_rows_of_every_kind_in_one_batch(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    host, device = both(vocab_size, *KINDS.values())
    slots = rng.permutation(np.repeat(np.arange(len(KINDS)), 12))
    rows = one_row_each(slots, rng.integers(9, 500, slots.size))
    logits = rng.normal(0, 2, (slots.size, vocab_size)).astype(np.float32)
    assert_equal_draws(host, device, logits, rows, 4)
    together = device.sample(torch.from_numpy(logits), rows)
    for row in range(0, slots.size, 7):
        alone = one_row_each(slots[row : row + 1], rows.positions[row : row + 1])
        assert device.sample(torch.from_numpy(logits[row : row + 1]), alone).tolist() == [together[row]]


def test_slots_come_and_go() -> None:
    """A slot keeps nothing of its former request."""
    rng = np.random.default_rng(0)
    host, device = both(64)
    kinds, used = list(KINDS.values()), set[int]()
    for _ in range(200):
        slot, sampling = int(rng.integers(4)), kinds[int(rng.integers(len(kinds)))]
        for sampler in (host, device):
            if slot in used:
                sampler.remove(slot)
            else:
                sampler.add(slot, sampling, np.arange(5), 3, (1,))
                sampler.append(slot, [7])
        used ^= {slot}
        device.check_integrity()
        if used:
            slots = rng.choice(sorted(used), 6)
            logits = rng.normal(0, 2, (6, 64)).astype(np.float32)
            assert_equal_draws(host, device, logits, one_row_each(slots, rng.integers(6, 99, 6)), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_lowest_ids(kind: str) -> None:
    host, device = both(8, KINDS[kind])
    logits = np.array([[0, 5, 5, 5, -1, 5, 0, 0], [2, 2, 2, 2, 2, 2, 2, 2]], np.float32)
    assert_equal_draws(host, device, logits, one_row_each(np.zeros(2, np.int64)), 5)


def test_filters_are_the_hosts() -> None:
    """Checks thresholds and ties, on logits with few distinct values and with many."""
    rng = np.random.default_rng(1)
    for draw in range(60):
        logits = rng.normal(0, 2, (9, 257)).astype(np.float32)
        if draw % 2:
            logits = np.round(logits)
        logits[rng.random(logits.shape) < 0.1] = -np.inf
        top_k, top_p = rng.integers(1, 258, 9), np.where(rng.random(9) < 0.3, 1.0, rng.random(9) + 1e-3).clip(max=1)
        min_p = np.where(rng.random(9) < 0.5, 0.0, rng.random(9))
        kept = keep_top(torch.from_numpy(logits), torch.from_numpy(top_k), torch.from_numpy(top_p))
        with np.errstate(divide="ignore"):
            margins = np.log(min_p.astype(np.float32))
        kept = keep_min_p(kept, torch.from_numpy(margins))
        expected = logits.copy()
        numpy_keep_top(expected, top_k, top_p)
        numpy_keep_min_p(expected, min_p)
        assert np.array_equal(kept.numpy(), expected)


def test_a_nucleus_ends_where_it_holds_its_share() -> None:
    """Different logits of equal weight make shares exact: half of four tokens are two."""
    scores = torch.tensor([[0.0, -1e-9, -2e-9, -3e-9]])
    kept = keep_top(scores, torch.tensor([4]), torch.tensor([0.5], dtype=torch.float64))
    assert torch.isfinite(kept).tolist() == [[True, True, False, False]]
    expected = scores.numpy().copy()
    numpy_keep_top(expected, np.array([4]), np.array([0.5]))
    assert np.array_equal(kept.numpy(), expected)


def test_a_token_without_rivals() -> None:
    logits = np.array([[-np.inf, 3.0, -np.inf, -np.inf], [1e30, -1e30, -np.inf, 1e38]], np.float32)
    for sampling in (Sampling(), Sampling(temperature=0.5, seed=2)):
        host, device = both(4, sampling)
        rows = one_row_each(np.zeros(2, np.int64))
        assert_equal_draws(host, device, logits, rows, 4)
        assert device.sample_draft(torch.from_numpy(logits), rows, 0).margins.tolist() == [MAX_MARGIN] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_unusable_logits_give_no_token_in_their_row_alone(kind: str, value: float) -> None:
    _, device = both(8, Sampling(temperature=0.5), KINDS[kind])
    logits, rows = torch.zeros((4, 8)), one_row_each(np.array([0, 0, 1, 1]))
    others = device.sample(logits, rows)[[0, 1, 3]]
    logits[2] = value if value == -math.inf else torch.tensor([0, 9, 1, 0, 0, value, 0, 0])
    tokens, drafts = device.sample(logits, rows), device.sample_draft(logits, rows, 3)
    assert tokens[2] == NO_TOKEN and np.array_equal(tokens[[0, 1, 3]], others)
    assert 0 <= drafts.tokens[2] < 8 and drafts.margins[2] == 0 and np.array_equal(drafts.tokens[[0, 1, 3]], others)


@pytest.mark.parametrize("num_candidates", [2, 5])
@pytest.mark.parametrize("with_noise", [False, True])
def test_candidate_margins_are_the_hosts(num_candidates: int, with_noise: bool) -> None:
    for seed in range(20):
        scene = Scene(seed)
        rng = np.random.default_rng(seed)
        num_rows = scene.rows.slots.size
        candidates = np.array([rng.permutation(VOCAB)[:num_candidates] for _ in range(num_rows)])
        scores = np.take_along_axis(scene.logits, candidates, axis=1)
        expected = scene.sampler.candidate_margins(scores, candidates, scene.rows, with_noise=with_noise)
        device = filled(both(VOCAB)[1], scene, scene.sampling)
        leads = device.candidate_margins(torch.from_numpy(scores), candidates, scene.rows, with_noise=with_noise)
        assert np.array_equal(leads, expected)


def test_what_rejection_sampling_and_log_probs_ask_for() -> None:
    for seed in range(20):
        scene = Scene(seed)
        device, logits = filled(both(VOCAB)[1], scene, scene.sampling), torch.from_numpy(scene.logits)
        assert np.array_equal(
            device.probabilities(logits, scene.rows), scene.sampler.probabilities(scene.logits, scene.rows)
        )
        token_ids = scene.sampler.sample(scene.logits, scene.rows)
        np.testing.assert_allclose(
            device.log_probs(logits, token_ids), scene.sampler.log_probs(scene.logits, token_ids), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
def test_one_fetch_per_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait for the device is a call of to_host; rules need no second one."""
    _, device = both(64, KINDS[kind], KINDS["temperature"])
    fetches = []
    to_host = sampler_module.to_host

    def counted(*tensors: torch.Tensor, **more: Any) -> list[np.ndarray]:
        fetches.append(len(tensors))
        return to_host(*tensors, **more)

    monkeypatch.setattr(sampler_module, "to_host", counted)
    logits = torch.randn((6, 64), generator=torch.Generator().manual_seed(0))
    device.sample_draft(logits, one_row_each(np.array([0, 1, 0, 1, 0, 1])), 2)
    device.sample(logits, one_row_each(np.array([0, 1, 0, 1, 0, 1])))
    has_rules = bool(device.parameters.has_rules[0])
    assert fetches == [1 + has_rules] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind: str) -> None:
    _, device = both(64, KINDS[kind])
    rows, logits = one_row_each(np.zeros(0, np.int64)), torch.zeros((0, 64))
    assert device.sample(logits, rows).shape == (0,)
    for num_candidates in (0, 1, 3):
        drawn = device.sample_draft(logits, rows, num_candidates)
        assert drawn.tokens.shape == drawn.margins.shape == (0,)


WORD = 2**64 - 1


@pytest.mark.parametrize("vocab_size", [1, 4, 2051])
def test_scores_have_the_hosts_noise_where_rows_are_random(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    keys = seed_keys(rng.integers(0, WORD, 6, dtype=np.uint64, endpoint=True))
    keys[:4] = 0, WORD, 2**63, 2**63 - 1
    positions = np.array([0, 1, 2**40, *rng.integers(0, 2**40, 3)])
    logits, scale = rng.normal(size=(6, vocab_size)).astype(np.float32), np.array([1, 2, 1, 0.5, 1, 1], np.float32)
    weight = np.array([1, 1, 0, 1, 1, 0], np.float32)
    given = (torch.from_numpy(each) for each in (logits, keys.view(np.int64), positions, scale, weight))
    scores = TorchNoise(vocab_size, CPU).perturbed(*given).numpy()
    noise = GumbelNoise(vocab_size).log_exponentials(keys, positions)
    np.testing.assert_allclose(scores, logits * scale[:, None] - noise * weight[:, None], rtol=1e-6, atol=1e-6)
    assert np.array_equal(scores[[2, 5]], logits[[2, 5]])


def test_tables_are_shared_and_large_vocabularies_refused() -> None:
    first, second = TorchNoise(2048, CPU), TorchNoise(2048, CPU)
    assert first._table.data_ptr() == second._table.data_ptr()
    with pytest.raises(ValueError, match="vocab_size = 2000000"):
        TorchNoise(2_000_000, CPU)
