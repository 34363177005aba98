"""Engines that draft with a block drafter: what they draft equals a dense reference, what they emit plain decoding."""

from __future__ import annotations

import numpy as np
import pytest

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.decision import WHOLE
from faser_backend.core.plan import StepRecord
from faser_backend.core.request import Sampling
from faser_backend.cpu.draft_runners import LlvmBlockRunner
from faser_backend.cpu.kernels.matrix_units import has_matrix_units
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.policy.cost_model import DRAFT, TARGET, BatchTimes, CallCost, Curve, OverheadCost
from faser_backend.serving.profile_store import cost_model_of
from tests.engines.test_dflash import MAX_ERROR
from tests.pipeline.test_eagle3_drafting import checked, make_requests, tokens_of
from tests.support.block_models import BLOCK_SIZE, KINDS, BuiltBlocks
from tests.support.cpu_products import UNIT_ERROR
from tests.support.harness import drive, request
from tests.support.tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltBlocks:
    return BuiltBlocks(tmp_path_factory.mktemp("blocks"), **KINDS[request.param])


def test_a_block_is_no_longer_than_the_drafter_s(built: BuiltBlocks) -> None:
    engine, checker = checked(built, "fixed:9")
    longest = []
    engine.step_runner.observers.append(lambda record: longest.append(record.frontier.num_drafted.max(initial=0)))
    drive(engine, make_requests(is_greedy=True))
    engine.close()
    assert max(longest) == BLOCK_SIZE - 1 + built.reference.is_dspark
    assert checker.num_equal == checker.num_chains > 20


def test_costs_count_the_rows_of_every_block(built: BuiltBlocks) -> None:
    engine, _ = checked(built, "fixed:4")
    drafter = engine.step_runner.partitions[WHOLE].draft
    assert isinstance(drafter, LlvmBlockRunner)
    run, calls = drafter.run_block, list[RowBatch]()
    drafter.run_block = lambda rows: (calls.append(rows), run(rows))[1]
    drive(engine, make_requests(is_greedy=True))
    engine.close()
    cost = CallCost(Curve.from_slopes(np.zeros(1), 0.0, np.ones(1)), logit_row_us=1000.0)
    costs = cost_model_of(built.manifest, {(m, WHOLE): (cost,) for m in (DRAFT, TARGET)}, OverheadCost(0, 0, 0, 0, 0))
    for rows in calls:
        lengths = np.diff(np.searchsorted(rows.logit_rows, rows.cu_rows))
        us = BatchTimes(costs, 4, lengths.size, 0, WHOLE).chains_us(lengths)
        assert us == pytest.approx(rows.num_rows + 1000 * rows.logit_rows.size)
        if len({*lengths}) == 1:
            assert costs.drafting_us(WHOLE, lengths[0], lengths.size, 0) == pytest.approx(us)
    assert len(calls) > 20


def test_draws_that_depend_on_those_before_are_made_in_order(
    built: BuiltBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, and beside them requests without rules: tokens equal plain decoding, and an engine that drew
    everything in order drafts the same."""
    rules = Sampling(temperature=1.0, seed=3, repetition_penalty=1.7)
    requests = [*make_requests(), request("ruled", list(range(5, 25)), 16, sampling=rules)]
    assert tokens_of(built, "fixed:4", requests) == tokens_of(built, "none", requests)

    def drafted() -> list[list[int]]:
        engine, _ = checked(built, "fixed:4")
        engine.step_runner.scheduler.max_gap_ms = 0.0  # how many prompt tokens a step reads depends on no clock
        chains: list[list[int]] = []
        engine.step_runner.observers.append(lambda record: chains.append(record.frontier.drafted.tolist()))
        drive(engine, make_requests())
        engine.close()
        return chains

    at_once = drafted()
    monkeypatch.setattr(NumpySampler, "has_rules", lambda self, slots: True)
    assert drafted() == at_once


def draft_errors(built: BuiltBlocks, acceptance: str, fault: str = "") -> tuple[float, float]:
    """Returns the largest differences from the reference: of tokens from draws of its logits with their own positions'
    noise, or of the distributions that rejection sampling tests; and of margins from its confidences."""
    engine, _ = checked(built, "fixed:4", acceptance=acceptance)
    drafter = engine.step_runner.partitions[WHOLE].draft
    assert isinstance(drafter, LlvmBlockRunner)
    run, biased = drafter.run_block, drafter.biased
    if fault == "no bias":
        drafter.biased = lambda logits, index, _: logits[index]
    elif fault == "token":
        drafter.biased = lambda logits, index, previous: biased(logits, index, (previous + 1) % VOCAB_SIZE)
    elif fault == "mask":
        drafter.mask_id = 5
    elif fault == "order":
        drafter.run_block = lambda rows: (run(rows)[0], run(rows)[1][::-1])  # pyright: ignore[reportOptionalSubscript]
    of_draws, of_margins = [], []

    def observe(record: StepRecord) -> None:
        frontier = record.frontier
        for row in np.flatnonzero(frontier.num_drafted):
            sequence, count = record.plan.decodes[row], int(frontier.num_drafted[row])
            tokens, drafted = sequence.token_ids[: record.num_tokens[row]].copy(), frontier.drafted[row, :count]
            logits, confidences = built.block_of(tokens, drafted)
            sampler, offsets = NumpySampler(VOCAB_SIZE, 1), np.arange(count)
            sampler.add(0, sequence.request.sampling, tokens, tokens.size, ())
            draws = SamplingRows(0 * offsets, tokens.size + offsets, 0 * offsets, offsets, drafted[None])
            if frontier.draft_probs is None:
                of_draws.append(sampler.sample(logits, draws) != drafted)
            else:
                of_draws.append(np.abs(frontier.draft_probs[row, :count] - sampler.probabilities(logits, draws)))
            assert frontier.margins is not None
            of_margins.append(np.abs(frontier.margins[row, :count] - np.logaddexp(0, confidences)))

    engine.step_runner.observers.append(observe)
    drive(engine, make_requests(4))
    engine.close()
    assert len(of_draws) > 20
    return max(each.max() for each in of_draws), max(each.max() for each in of_margins)


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_each_draw_has_its_reference_s_distribution_and_confidence(built: BuiltBlocks, acceptance: str) -> None:
    error = UNIT_ERROR if has_matrix_units() else MAX_ERROR
    of_draws, of_margins = draft_errors(built, acceptance)
    assert of_draws < error
    for fault in ("mask", *("no bias", "token") * built.reference.has_bias):
        assert draft_errors(built, acceptance, fault)[0] > 0.1, fault
    if built.reference.has_bias:
        assert of_margins < error
        assert draft_errors(built, acceptance, "order")[1] > 0.1
