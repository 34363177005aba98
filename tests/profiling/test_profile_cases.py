"""Calls that `faser profile` measures, and on which cores."""

import numpy as np
import pytest

from faser_backend.core.decision import WHOLE
from faser_backend.device.partition import core_partitions
from faser_backend.policy.cost_model import DRAFT, TARGET
from faser_backend.profiling.cases import (
    MAX_CALL_ROWS,
    MAX_SEQUENCES,
    MIN_CASES,
    NUM_RANDOM,
    Case,
    choose_cases,
    make_batch,
)
from faser_backend.profiling.measure import chain_case, is_chain, shares_of


@pytest.mark.parametrize(
    ("model", "max_context", "share"), [(TARGET, 16, 1.0), (TARGET, 128, 0.5), (DRAFT, 16, 0.01), (DRAFT, 2048, 1.0)]
)
def test_cases_stay_within_what_an_engine_can_run(model: str, max_context: int, share: float) -> None:
    cases = choose_cases(model, max_context, np.random.default_rng(0), share)
    for case in cases:
        assert case.num_tokens <= max_context and case.context >= 0 and min(case.counts) >= 1
        assert len(case.counts) <= MAX_SEQUENCES and case.num_rows <= MAX_CALL_ROWS
        assert case.num_logit_rows in (0, len(case.counts), case.num_rows)
    assert len(cases) >= MIN_CASES and (share < 1.0 or len(cases) >= NUM_RANDOM)


def test_batches_hold_their_case_even_where_the_pool_is_smaller() -> None:
    case = Case((2, 1, 5), 9, 3)
    batch = make_batch(case, 97, 4, 5, np.random.default_rng(0))
    assert batch.rows_per_sequence.tolist() == [2, 1, 5] and batch.context_lens.tolist() == [9, 9, 9]
    assert batch.block_tables.shape == (3, 4) and batch.block_tables.max() < 5
    assert batch.logit_rows.tolist() == [1, 2, 7]


def test_one_core_is_measured_whole_and_more_as_splits_in_company() -> None:
    assert [share.partition for share in shares_of(core_partitions((0,)))] == [WHOLE, WHOLE]
    shares = shares_of(core_partitions((0, 1, 2, 3)))
    assert [(s.model, s.partition, s.part.size) for s in shares[2:4]] == [(TARGET, "1/3", 3), (DRAFT, "1/3", 1)]
    for share in shares[2:]:
        assert share.company is not None and not set(share.company.cores) & set(share.part.cores)


def test_a_batch_has_blocks_for_the_chain_behind_it() -> None:
    """And the chain ends where the model's context does."""
    case = chain_case(Case((1, 1), 126, 2), 4, 128)
    assert case == Case((1, 1), 124, 2)
    batch = make_batch(case, 97, 4, 80, np.random.default_rng(0), room=4)
    assert batch.block_tables.shape == (2, 33) and batch.context_lens.tolist() == [124, 124]
    assert is_chain(case.counts, case.num_logit_rows)
    assert not is_chain((1, 2), 2) and not is_chain((1, 1), 0)
