"""Fates of drafted tokens and of the target's work, from the records of a run's steps.

While the engine runs, a step is only recorded; figures are computed afterwards. Tokens are keyed by seed and position,
so an unverified draft token would have been accepted iff the answer holds it at its position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser_backend.core.decision import PipelineMode, Score
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.timing import PhaseEvent

MODEL_CALLS = frozenset({"draft_model", "target_model", "prefill_model"})
PLANNING = frozenset({"schedule", "observe"})


class StepNote(NamedTuple):
    """A step's record without its logits. Arrays are over the B sequences that were verified."""

    start_ns: int
    end_ns: int
    mode: PipelineMode
    sequences: list[Sequence]
    ahead: set[Sequence]  # sequences of these for which the draft ran ahead
    num_tokens: np.ndarray  # [B] before the step
    drafted: np.ndarray  # [B, K]
    num_drafted: np.ndarray  # [B]
    num_rows: np.ndarray  # [B] rows that entered the target
    num_kept: np.ndarray  # [B] rows that left it
    num_accepted: np.ndarray  # [B]
    num_emitted: np.ndarray  # [B]
    num_row_layers: int
    propose_us: float
    verify_us: float
    overlap_us: float
    reason: str = ""  # the decision's reason, in words
    scores: tuple[Score, ...] = ()  # the policy's scores of its candidates


class StepLog:
    """The records of one engine's steps, and the laps of both lanes (none in virtual time). `start` clears them."""

    def __init__(self, engine: Engine, *, with_laps: bool = True) -> None:
        self._step_runner = engine.step_runner
        self._with_laps = with_laps
        self.start()
        engine.step_runner.observers.append(self._note)

    def start(self) -> None:
        self.notes: list[StepNote] = []
        self.target_laps: list[PhaseEvent] = []  # with the laps of the step itself
        self.draft_laps: list[PhaseEvent] = []
        if self._with_laps:
            self._step_runner.times.events, self._step_runner.draft_times.events = self.target_laps, self.draft_laps

    def _note(self, record: StepRecord) -> None:
        frontier, verification, acceptance = record.frontier, record.verification, record.acceptance
        decision = record.plan.decision
        self.notes.append(
            StepNote(
                record.start_ns,
                record.end_ns,
                decision.mode,
                record.plan.decodes,
                set(record.plan.drafts).intersection(record.plan.decodes) if record.plan.drafts else set(),
                record.num_tokens,
                frontier.drafted,
                frontier.num_drafted,
                frontier.num_rows,
                verification.num_kept,
                acceptance.num_accepted,
                acceptance.num_emitted,
                verification.num_row_layers,
                record.propose_us,
                record.verify_us,
                record.overlap_us,
                decision.reason,
                decision.scores,
            )
        )


class Lost(NamedTuple):
    """Counts of unverified draft tokens that would have been accepted, by reason."""

    to_trim: int
    to_exit: int


def count_lost(notes: list[StepNote]) -> Lost:
    """Compares dropped tokens with the answers' tokens at their positions. All answers must be complete.

    A dropped token counts only if everything before it in its chain was accepted, or would have been.
    """
    to_trim = to_exit = 0
    for note in notes:
        drops = (note.num_kept < note.num_drafted) & (note.num_accepted == note.num_kept)
        for row in np.flatnonzero(drops):
            sequence, kept, drafted = note.sequences[row], int(note.num_kept[row]), int(note.num_drafted[row])
            first = int(note.num_tokens[row])  # position of the chain's first token
            answer = sequence.token_ids[first + kept : min(first + drafted, sequence.num_tokens)]
            dropped = note.drafted[row, kept : kept + answer.size]
            run = int(np.logical_and.accumulate(answer == dropped).sum())
            pruned = min(run, max(0, int(note.num_rows[row]) - kept))
            to_exit += pruned
            to_trim += run - pruned
    return Lost(to_trim, to_exit)


def figures(log: StepLog, num_layers: int) -> dict[str, float]:
    """Returns the figures of a run that bench.json adds to its answers'. num_layers: of the target."""
    notes = log.notes
    drafted, rows, kept, accepted, emitted = (
        np.concatenate([getattr(note, name) for note in notes])
        for name in ("num_drafted", "num_rows", "num_kept", "num_accepted", "num_emitted")
    )
    ahead = np.concatenate([[sequence in note.ahead for sequence in note.sequences] for note in notes]).astype(bool)
    lost = count_lost(notes)
    num_accepted = int(accepted.sum())
    full_rows = int(kept.sum())
    pruned_layers = sum(note.num_row_layers for note in notes) - full_rows * num_layers
    pruned_rows = int((rows - kept).sum())
    # Running ahead drops a chain's bonus row, which is no decision about confidence.
    trimmed_rows = int((drafted + 1 - rows - ahead).sum())
    batch = np.array([len(note.sequences) for note in notes])
    modes = {f"share_{mode.value}": np.mean([note.mode is mode for note in notes]).item() for mode in PipelineMode}
    return {
        "num_steps": len(notes),
        "mean_batch_size": float(batch.mean()),
        "mean_length": float(drafted.mean()),
        "rows_drafted": int(drafted.sum()),
        "rows_accepted": num_accepted,
        "rows_verified": int(rows.sum()),
        "rows_trimmed": trimmed_rows,
        "rows_pruned": pruned_rows,
        "row_layers_accepted": int(emitted.sum()) * num_layers,
        "row_layers_rejected": (full_rows - int(emitted.sum())) * num_layers,
        "row_layers_pruned": pruned_layers,
        "row_layers_saved_by_exit": pruned_rows * num_layers - pruned_layers,
        "lost_to_trim": lost.to_trim,
        "lost_to_exit": lost.to_exit,
        "retention": num_accepted / (num_accepted + sum(lost)) if num_accepted else 1.0,
        "chains_ahead": int(ahead.sum()),
        "chains_ahead_discarded": int((ahead & (accepted < drafted)).sum()),
        **modes,
        **_time_figures(log),
        **(_lap_figures(log) if log.target_laps else {}),
    }


def _time_figures(log: StepLog) -> dict[str, float]:
    notes = log.notes
    overlap_us = sum(note.overlap_us for note in notes)
    phases_us = sum(note.propose_us + note.verify_us for note in notes) - overlap_us
    return {
        "overlap_share": overlap_us / phases_us if phases_us else 0.0,
        "verify_us_p50": float(np.median([note.verify_us for note in notes])),
    }


def _lap_figures(log: StepLog) -> dict[str, float]:
    plan_us = planning_us(log.target_laps)
    laps = [*log.target_laps, *log.draft_laps]
    busy_us = _union_us(laps)
    calls_us = _union_us([lap for lap in laps if lap.phase in MODEL_CALLS])
    return {
        "plan_us_mean": float(plan_us.mean()),
        "plan_us_p50": float(np.percentile(plan_us, 50)),
        "plan_us_p99": float(np.percentile(plan_us, 99)),
        "plan_share": float(plan_us.sum()) / busy_us,
        "step_overhead_share": 1.0 - calls_us / busy_us,
    }


def planning_us(laps: list[PhaseEvent]) -> np.ndarray:
    """Returns the scheduler's and the policy's time in each step: planning it, and learning from its record."""
    planning = [lap for lap in laps if lap.phase in PLANNING]
    step = np.maximum(np.cumsum([lap.phase == "schedule" for lap in planning]) - 1, 0)
    return np.bincount(step, [(lap.end_ns - lap.start_ns) / 1e3 for lap in planning])


def _union_us(laps: list[PhaseEvent]) -> float:
    """Returns the time that at least one lap covers; laps of lanes may overlap."""
    spans = np.array(sorted((lap.start_ns, lap.end_ns) for lap in laps), np.int64)  # [L, 2]
    ends = np.maximum.accumulate(spans[:, 1])
    starts = np.maximum(spans[:, 0], np.concatenate([[spans[0, 0]], ends[:-1]]))
    return float(np.maximum(spans[:, 1] - starts, 0).sum()) / 1e3
