"""Holds the phases of a step against what the cost model says of what they did."""

from __future__ import annotations

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.core.record import StepRecord
from faser_backend.policy.batch_times import BatchTimesCache
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel
from faser_backend.policy.time_errors import TimeErrors


def observe_times(
    record: StepRecord, costs: CostModel, known: BatchTimesCache, errors: TimeErrors, *, knows_who: bool
) -> None:
    """Tells `errors` how long the step's phases took beside what was predicted of them. knows_who: whether the draft
    made the chains is known."""
    plan, size = record.plan, record.num_tokens.size
    partition = plan.decision.partition
    context = costs.batch_context(record.num_tokens.tolist())
    times = known.of(size, context, partition)
    is_trimmed = plan.decision.trim is not None
    num_rows = record.verification.num_kept
    verify_us = times.step_us(int(num_rows.sum()) - size, int(num_rows.max()) - 1)
    if plan.drafts:
        lengths = np.array(plan.num_ahead_tokens)
        drafting = known.of(lengths.size, context, partition)
        verify_us += times.lanes_us
    else:
        lengths, drafting = np.where(record.frontier.is_look_up, 0, record.frontier.num_drafted), times
    reading_us = _target_reading_us(record, costs) + record.draft_prefill_us
    measured_us = record.step_us - reading_us - record.propose_us + record.overlap_us
    errors.observe(TARGET, partition, float(num_rows.sum()), verify_us, measured_us)
    if knows_who and lengths.any() and record.propose_us:
        draft_us = drafting.chains_us(lengths, is_trimmed=is_trimmed)
        errors.observe(DRAFT, partition, float(np.count_nonzero(lengths)), draft_us, record.propose_us)


def _target_reading_us(record: StepRecord, costs: CostModel) -> float:
    """What the target's reading of prompts took of the step. A device that computes while the host goes on shows the
    host next to nothing of it: then it is what is predicted."""
    chunks = record.plan.prefills
    if not chunks:
        return 0.0
    num_rows = [chunk.num_tokens for chunk in chunks]
    context = costs.batch_context([chunk.start + 1 for chunk in chunks])
    us = costs.call_us(TARGET, WHOLE, sum(num_rows), len(num_rows), context, max_rows=max(num_rows), num_logit_rows=0)
    return record.prefill_us if record.prefill_us > 0.5 * float(us) else float(us)
