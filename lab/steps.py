"""Fates of drafted tokens and of the target's work, from the records of a run's steps.

While the engine runs, a step is only recorded; figures are computed afterwards. Tokens are keyed by seed and position,
so an unverified draft token would have been accepted iff the answer holds it at its position.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faser_backend.core.decision import PipelineMode
from faser_backend.core.plan import StepRecord
from faser_backend.core.ports import PhaseEvent
from faser_backend.pipeline.engine import Engine

MODEL_CALLS = frozenset({"draft_model", "target_model", "prefill_model"})
PLANNING = frozenset({"schedule", "observe"})


class StepLog:
    """The records of one engine's steps without their logits, and the laps of both lanes (none in virtual time).

    `start` clears them.
    """

    def __init__(self, engine: Engine, *, with_laps: bool = True) -> None:
        self._step_runner, self._with_laps = engine.step_runner, with_laps
        self.start()
        engine.step_runner.observers.append(self._note)

    def start(self) -> None:
        self.records: list[StepRecord] = []
        self.target_laps: list[PhaseEvent] = []  # with the laps of the step itself
        self.draft_laps: list[PhaseEvent] = []
        if self._with_laps:
            self._step_runner.times.events, self._step_runner.draft_times.events = self.target_laps, self.draft_laps

    def _note(self, record: StepRecord) -> None:
        self.records.append(replace(record, verification=replace(record.verification, logits=None)))


def count_lost(records: list[StepRecord]) -> tuple[int, int]:
    """Returns how many unverified draft tokens would have been accepted: lost to trim, and to exits.

    Compares them with the answers, which must be complete. A dropped token counts only if everything before it in its
    chain was accepted, or would have been.
    """
    to_trim = to_exit = 0
    for record in records:
        frontier, num_kept = record.frontier, record.verification.num_kept
        drops = (num_kept < frontier.num_drafted) & (record.acceptance.num_accepted == num_kept)
        for row in np.flatnonzero(drops):
            sequence, kept, drafted = record.plan.decodes[row], int(num_kept[row]), int(frontier.num_drafted[row])
            first = int(record.num_tokens[row])  # position of the chain's first token
            answer = sequence.token_ids[first + kept : min(first + drafted, sequence.num_tokens)]
            dropped = frontier.drafted[row, kept : kept + answer.size]
            run = int(np.logical_and.accumulate(answer == dropped).sum())
            pruned = min(run, max(0, int(frontier.num_rows[row]) - kept))
            to_exit += pruned
            to_trim += run - pruned
    return to_trim, to_exit


def figures(log: StepLog, num_layers: int) -> dict[str, float]:
    """Returns the figures of a run that bench.json adds to its answers'. num_layers: of the target."""
    records = log.records
    frontiers, acceptances = [record.frontier for record in records], [record.acceptance for record in records]
    drafted = np.concatenate([frontier.num_drafted for frontier in frontiers])
    rows = np.concatenate([frontier.num_rows for frontier in frontiers])
    kept = np.concatenate([record.verification.num_kept for record in records])
    accepted = np.concatenate([acceptance.num_accepted for acceptance in acceptances])
    emitted = np.concatenate([acceptance.num_emitted for acceptance in acceptances])
    drafts = [(set(record.plan.drafts), record.plan.decodes) for record in records]
    ahead = np.array([sequence in drafting for drafting, decodes in drafts for sequence in decodes], bool)
    lost_to_trim, lost_to_exit = count_lost(records)
    num_accepted = int(accepted.sum())
    acceptable = num_accepted + lost_to_trim + lost_to_exit
    full_rows = int(kept.sum())
    pruned_layers = sum(record.verification.num_row_layers for record in records) - full_rows * num_layers
    pruned_rows = int((rows - kept).sum())
    # Running ahead drops a chain's bonus row, which is no decision about confidence.
    trimmed_rows = int((drafted + 1 - rows - ahead).sum())
    decided = [record.plan.decision.mode for record in records]
    modes = {f"share_{mode.value}": np.mean([each is mode for each in decided]).item() for mode in PipelineMode}
    overlap_us = sum(record.overlap_us for record in records)
    phases_us = sum(record.propose_us + record.verify_us for record in records) - overlap_us
    return {
        "num_steps": len(records),
        "mean_batch_size": drafted.size / len(records),
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
        "lost_to_trim": lost_to_trim,
        "lost_to_exit": lost_to_exit,
        "retention": num_accepted / acceptable if acceptable else 1.0,
        "chains_ahead": int(ahead.sum()),
        "chains_ahead_discarded": int((ahead & (accepted < drafted)).sum()),
        **modes,
        "overlap_share": overlap_us / phases_us if phases_us else 0.0,
        "verify_us_p50": float(np.median([record.verify_us for record in records])),
        **(_lap_figures(log) if log.target_laps else {}),
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
