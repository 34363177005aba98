"""Makes the `StepRecord` of a step: what was planned, what became of it, and how long every phase took."""

from __future__ import annotations

from faser_backend.core.plan import StepPlan
from faser_backend.core.record import StepRecord
from faser_backend.pipeline.phases import Phases, Span
from faser_backend.pipeline.prefill import PrefillTimes
from faser_backend.pipeline.rows import DecodeBatch


def recorded(plan: StepPlan, batch: DecodeBatch, phases: Phases, reading: PrefillTimes, step: Span) -> StepRecord:
    """Returns the record of a step that verified something."""
    assert phases.verified is not None
    return StepRecord(
        plan=plan,
        frontier=phases.frontier,
        verification=phases.verified.verification,
        acceptance=phases.verified.acceptance,
        num_tokens=batch.num_tokens,
        start_ns=step.start_ns,
        end_ns=step.end_ns,
        propose_us=phases.propose_us,
        verify_us=phases.verify_us,
        overlap_us=phases.overlap_us,
        drafting_us=plan.in_flight.drafting_us,
        prefill_us=reading.target_us,
        draft_prefill_us=reading.draft_us,
    )
