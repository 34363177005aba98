"""What the cost model says of a step that was made, and to which arm the step belongs: measured times are held
against it."""

from __future__ import annotations

import numpy as np

from faser_backend.core.decision import WHOLE, PipelineMode
from faser_backend.core.record import StepRecord
from faser_backend.policy.arms import PLAIN, Arm
from faser_backend.policy.cost_model import TARGET
from faser_backend.policy.pricing import Pricer


def arm_of(record: StepRecord) -> Arm:
    """The arm that a step belongs to."""
    decision = record.plan.decision
    if not record.frontier.num_drafted[record.server_rows].any() and not record.plan.drafts:
        return PLAIN
    is_trimmed = decision.trim is not None or decision.mode is not PipelineMode.SERIAL
    return Arm(decision.mode, decision.partition, is_trimmed)


def predicted_us(pricer: Pricer, record: StepRecord, arm: Arm, context: int | None = None) -> float:
    """Of drafting and verifying what the step drafted and verified; prompts aside.

    context: as if its sequences had so many tokens; None: as they were.
    """
    size = record.num_tokens.size
    if context is None:
        context = pricer.costs.batch_context(record.num_tokens.tolist())
    times = pricer.times(size, context, arm.partition)
    is_trimmed = record.plan.decision.trim is not None
    num_rows = record.verification.num_kept
    verify_us = times.verify_us(int(num_rows.sum()) - size, int(num_rows.max()) - 1)
    if record.plan.drafts:
        lengths = np.array(record.plan.num_ahead_tokens)
        drafting = pricer.times(lengths.size, context, arm.partition)
        us = max(verify_us, drafting.chains_us(lengths, is_trimmed=is_trimmed)) + pricer.costs.overhead.lanes_us
        if record.drafting_us:
            us += times.chains_us(record.frontier.num_drafted, is_trimmed=is_trimmed)
        return us
    return verify_us + times.chains_us(record.frontier.num_drafted, is_trimmed=is_trimmed)


def prompts_us(pricer: Pricer, record: StepRecord, slowdown: float) -> float:
    """What both models' reading of prompts took of the step.

    A device that computes while the host goes on shows the host next to nothing: it took what is predicted at least.
    slowdown: measured over predicted time, as of late.
    """
    plan = record.plan
    num_read = sum(chunk.num_tokens for chunk in plan.draft_prefills)
    target_us = 0.0
    if plan.prefills:
        num_rows = [chunk.num_tokens for chunk in plan.prefills]
        context = pricer.costs.batch_context([chunk.start + 1 for chunk in plan.prefills])
        us = pricer.costs.call_us(
            TARGET, WHOLE, sum(num_rows), len(num_rows), context, max_rows=max(num_rows), num_logit_rows=0
        )
        target_us = max(record.prefill_us, float(us) * slowdown)
        num_read += sum(num_rows) if plan.decision.prefills_draft else 0
    draft_us = max(record.draft_prefill_us, num_read * pricer.draft_read_us) if record.draft_prefill_us else 0.0
    return target_us + draft_us
