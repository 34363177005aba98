"""Planted acceptance, cases of kernels, synthetic pairs and their costs: what the GPU check builds its figures on."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.ports import DraftTokens
from faser_backend.core.request import SamplingParams
from faser_backend.device.sampler import NumpySampler
from faser_backend.policy.cost_model import DRAFT, TARGET
from lab.gpu import kernel_checks, kernels, ladder, latency, parity
from lab.gpu.costs import fit_costs, fit_error, with_overhead
from lab.gpu.economics import predicted_round, with_prediction
from lab.gpu.kernel_cases import DTYPES, GEOMETRIES, random_call, timed_calls
from lab.gpu.pairs import model_pair, random_tensors
from lab.gpu.planted import PlantedDraftLoop, PlantedSampler, planted_process, process_in_words
from lab.gpu.worker import Context
from lab.shapes import TINY_PAIR, AttentionShape
from lab.simulation.acceptance import Outcomes

torch.set_num_threads(1)
VOCAB_SIZE, SLOTS, POSITIONS = 50, 3, 40


def outcomes(acceptance: float = 0.75) -> Outcomes:
    planted = Outcomes(planted_process(acceptance), 1, SLOTS, POSITIONS, VOCAB_SIZE)
    for slot in range(SLOTS):
        planted.plant(slot, 100 + slot, 10)
    return planted


def rows_at(slots: np.ndarray, positions: np.ndarray) -> SamplingRows:
    none = np.zeros(slots.size, np.int64)
    return SamplingRows(slots, positions, np.arange(slots.size), none, np.zeros((slots.size, 1), np.int64))


@pytest.mark.parametrize("acceptance", [0.5, 0.75, 0.9])
def test_draft_and_target_agree_as_often_as_asked(acceptance):
    process = planted_process(acceptance)
    planted = Outcomes(process, 0, 1, 200, VOCAB_SIZE)
    matches = []
    for request in range(300):
        planted.plant(0, request, 5)
        positions = np.arange(5, 205)
        slots = np.zeros_like(positions)
        matches.append(planted.draft(slots, positions)[0] == planted.target(slots, positions))
    rates = np.array(matches).mean(axis=1)
    assert rates.mean() == pytest.approx(acceptance, abs=0.02)
    assert rates.std() > 0.03, "requests differ"


def test_margins_and_exits_tell_as_much_as_documented():
    found = process_in_words(planted_process())
    assert found["margin_auc"] == pytest.approx(0.80, abs=0.02)
    assert found["exit_auc"] == pytest.approx(0.80, abs=0.02)
    assert 2.0 < found["mean_accepted_4"] < 2.3


def test_a_planted_sampler_hands_on_planted_tokens_whatever_the_logits():
    planted = outcomes()
    sampler = PlantedSampler(NumpySampler(VOCAB_SIZE, SLOTS), planted)
    for slot in range(SLOTS):
        sampler.add(slot, SamplingParams(temperature=0.8, seed=100 + slot), np.zeros(10, np.int64), 10, ())
    slots, positions = np.array([2, 0]), np.array([11, 17])
    rows = rows_at(slots, positions)
    drawn = []
    for seed in range(2):
        logits = np.random.default_rng(seed).standard_normal((2, VOCAB_SIZE)).astype(np.float32)
        draft = sampler.sample_draft(logits, rows, 4)
        assert np.array_equal(draft.candidates[:, 0], draft.tokens)
        drawn.append((sampler.sample(logits, rows), draft.tokens, draft.margins))
    for one, other in zip(*drawn, strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(drawn[0][0], planted.target(slots, positions))


class EchoLoop:
    """A draft loop whose device draws zeros."""

    def can_draft(self, slots: np.ndarray) -> bool:
        return True

    def draft(self, rows: RowBatch, slots, num_draft_tokens, num_candidates) -> DraftTokens:
        shape = (slots.size, int(num_draft_tokens.max()))
        return DraftTokens(np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros((*shape, 4), np.int64))


def test_a_planted_loop_drafts_what_single_draws_would():
    planted = outcomes()
    slots, lengths = np.array([1, 2]), np.array([3, 2])
    rows = RowBatch(
        np.zeros(3, np.int64), np.array([0, 2, 3]), np.array([9, 14]), np.zeros((2, 2), int), np.array([1, 2])
    )
    drawn = PlantedDraftLoop(EchoLoop(), planted).draft(rows, slots, lengths, 4)
    for index, first in enumerate((11, 15)):
        positions = np.arange(first, first + 3)
        tokens, margins = planted.draft(np.full(3, slots[index]), positions)
        assert np.array_equal(drawn.tokens[index], tokens) and np.array_equal(drawn.margins[index], margins)
    assert np.array_equal(drawn.candidates[:, :, 0], drawn.tokens)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_random_calls_are_such_as_runners_make(name):
    rng = np.random.default_rng(3)
    for geometry in GEOMETRIES[name] * 5:
        call = random_call(geometry, DTYPES[name], "cpu", rng)
        table, cu_rows, contexts, slots = (tensor.numpy() for tensor in call.tensors[5:])
        written = slots[slots >= 0]
        assert np.unique(written).size == written.size, "no two rows share a slot"
        assert (slots[cu_rows[-1] :] == -1).all(), "rows of nobody write nothing"
        sequence = np.repeat(np.arange(contexts.size), np.diff(cu_rows))
        for row in np.flatnonzero(slots[: cu_rows[-1]] >= 0):
            owner = sequence[row]
            position = contexts[owner] + row - cu_rows[owner]
            assert slots[row] // geometry.kv_block_size == table[owner, position // geometry.kv_block_size]


def test_copies_of_a_timed_call_share_no_block():
    calls = timed_calls(AttentionShape(2, 20, 5, 4, 2, 32), 3, torch.float32, "cpu", 0)
    tables = [set(call.tensors[5].flatten().tolist()) for call in calls]
    assert not tables[0] & tables[1] and not tables[1] & tables[2]
    slots = calls[1].tensors[8].numpy()
    assert {int(slot) // 16 for slot in slots} <= tables[1]


def test_synthetic_weights_keep_hidden_states_near_one():
    spec = TINY_PAIR.target
    weights = random_tensors(spec, "fp32", torch.device("cpu"), 0)
    assert weights.embedding.std().item() == pytest.approx(1.0, abs=0.05)
    assert weights.layers[0].qkv.shape == ((4 + 2 * 2) * 16, 64)
    again = random_tensors(spec, "fp32", torch.device("cpu"), 0)
    assert torch.equal(weights.layers[2].down, again.layers[2].down)
    pair = model_pair(TINY_PAIR, "fp32")
    assert [(each.first_layer, each.last_layer) for each in pair.target.segments] == [(0, 1), (1, 3)]
    assert pair.target.segments[0].has_exit_scores and not pair.draft.segments[0].has_exit_scores


def points() -> list[dict]:
    """Calls of a target of two segments and a draft that take exactly what a simple law says."""
    found = []
    for partition, slow in (("whole", 1.0), ("8/124", 2.0)):
        for sequences in (1, 4, 16):
            for rows in (1, 3, 5):
                for context in (64, 512):
                    shape = {"sequences": sequences, "rows": rows, "context": context, "partition": partition}
                    first, last = (slow * (base + 2.0 * sequences * rows) for base in (100.0, 400.0))
                    found.append({"model": TARGET, "segment_us": [first, last], **shape})
                    if rows == 1:
                        found.append({"model": DRAFT, "segment_us": [slow * (50.0 + sequences)], **shape})
    return found


def test_costs_follow_what_was_measured():
    costs = fit_costs(points(), 16, 1024)
    assert costs.partitions == ("whole", "8/124")
    assert max(fit_error(costs, points()).values()) < 2.0
    assert float(costs.call_us(TARGET, "whole", 12, 4, 64)) == pytest.approx(548.0, rel=0.02)
    assert float(costs.call_us(TARGET, "8/124", 12, 4, 64, last_segment=1)) == pytest.approx(248.0, rel=0.02)
    steps = np.array([[size, 5 * size, 80.0 + 3.0 * size] for size in (1, 8, 32)])
    overhead = with_overhead(costs, steps, (10.0, 0.5), 7.0).overhead
    assert float(overhead.step(16, 80)) == pytest.approx(128.0, rel=0.02)
    assert (overhead.exit_us, overhead.exit_row_us, overhead.lanes_us) == (10.0, 0.5, 7.0)


def test_predictions_stand_beside_what_was_measured():
    costs = fit_costs(points(), 16, 1024)
    matches = planted_process().sample(50, 64)[1]
    asked = {"size": 4, "context": 100.0, "matches": matches}
    plain = predicted_round("none", costs, "8/124", **asked)
    assert plain is not None and plain.us == pytest.approx(516.0, rel=0.02) and plain.tokens == 1.0
    serial = predicted_round("fixed:2", costs, "8/124", **asked)
    assert serial is not None and serial.us == pytest.approx(2 * 54.0 + 548.0, rel=0.02)
    ahead = predicted_round("fixed:4 (run-ahead)", costs, "8/124", **asked)
    assert ahead is not None and ahead.us > 2 * (500.0 + 4.0 * 16)
    assert predicted_round("faser", costs, "8/124", **asked) is None
    assert predicted_round("fixed:4 (run-ahead)", costs, None, **asked) is None
    row = {
        "num_clients": 4,
        "tokens_per_s": 3000.0,
        "share_serial": 1.0,
        "step_us_p50": 2 * serial.us,
        "mean_accepted": 0.0,
    }
    predicted = with_prediction(row, serial)["predicted"]
    assert predicted["time_ratio"] == pytest.approx(2.0)
    assert predicted["yield_ratio"] == pytest.approx(1.0 / serial.tokens)


def test_a_wrong_kernel_and_one_that_leaves_rows_unwritten_are_found(monkeypatch):
    def wrong(hidden, kept, out) -> None:
        out.copy_(hidden[kept] * 1.1)

    monkeypatch.setattr(kernel_checks, "compact_rows", wrong)
    monkeypatch.setattr(kernel_checks, "gated_silu", lambda gate_up, out: None)
    found = kernels.correctness(Context("cpu", is_tiny=True, seed=0, end_s=time.monotonic() + 60))
    wrong_ones = {case["kernel"] for case in found["cases"] if not case["is_right"]}
    assert wrong_ones == {"compact_rows", "gated_silu"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("part", [parity.torch_runtime, latency.run, ladder.demo, ladder.pair_8b])
def test_parts_refuse_another_device_than_was_asked_for(part):
    with pytest.raises(RuntimeError, match=r"device = 'cuda': torch .* would compute on 'cpu'"):
        part(Context("cuda", is_tiny=True, seed=0, end_s=time.monotonic() + 60))
