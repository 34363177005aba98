"""Makes a timeline in Chrome's trace event format, for ui.perfetto.dev: the step and both lanes, side by side.

Each pipeline mode is a process with the lanes `step`, `draft` and `target`. Events of the step lane carry counts and
the policy's reason. An event of another lane is one lap.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from faser_backend.core.plan import StepRecord
from faser_backend.lab.steps import StepLog

LANES = {"step": 1, "draft": 2, "target": 3}
STEP_PHASES = frozenset({"schedule", "accept", "commit", "observe", "wait"})
SHOWN = {
    "draft_rows": "pack", "draft_model": "draft", "draft_sample": "sample", "draft_lookup": "look up",
    "target_rows": "pack", "target_model": "verify", "exit": "exit", "prefill_rows": "pack prefill",
    "prefill_model": "prefill",
}  # fmt: skip


def trace_events(name: str, process: int, log: StepLog, max_steps: int) -> list[dict[str, Any]]:
    """Returns the events of the last max_steps steps of a log, in microseconds since the first of them."""
    records = log.records[-max_steps:]
    start, ends = records[0].start_ns, [record.end_ns for record in records]
    about = [
        ("process_name", 0, {"name": name}),
        *(("thread_name", tid, {"name": lane}) for lane, tid in LANES.items()),
    ]
    about += [("thread_sort_index", tid, {"sort_index": tid}) for tid in LANES.values()]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": n, "pid": process, "tid": tid, "args": a} for n, tid, a in about
    ]
    for record in records:
        title = f"step ({record.plan.decision.mode.value})"
        events.append(_event(title, (process, "step"), (record.start_ns, record.end_ns), start))
        events[-1]["args"] = _args(record)
    for lane, laps in (("target", log.target_laps), ("draft", log.draft_laps)):
        for lap in laps:
            if lap.start_ns >= start:
                where = "step" if lap.phase in STEP_PHASES else lane
                # An observation begins inside the step that it observes, and is shown behind it.
                begin = ends[bisect_right(ends, lap.end_ns) - 1] if lap.phase == "observe" else lap.start_ns
                shown = SHOWN.get(lap.phase, lap.phase)
                events.append(_event(shown, (process, where), (begin, lap.end_ns), start))
    return events


def _event(name: str, track: tuple[int, str], span_ns: tuple[int, int], origin_ns: int) -> dict[str, Any]:
    """Returns a slice of a track, which is a process and one of its lanes."""
    process, lane = track
    start, end = ((moment_ns - origin_ns) / 1e3 for moment_ns in span_ns)
    return {"ph": "X", "name": name, "cat": lane, "pid": process, "tid": LANES[lane], "ts": start, "dur": end - start}


def _args(record: StepRecord) -> dict[str, Any]:
    """Returns the counts of a step, with the reason and the best score of a policy that weighs candidates."""
    frontier, decision = record.frontier, record.plan.decision
    args: dict[str, Any] = {
        "batch_size": len(record.plan.decodes),
        "drafted": int(frontier.num_drafted.sum()),
        "rows": int(frontier.num_rows.sum()),
        "rows_pruned": int((frontier.num_rows - record.verification.num_kept).sum()),
        "accepted": int(record.acceptance.num_accepted.sum()),
        "tokens": int(record.acceptance.num_emitted.sum()),
        "overlap_us": round(record.overlap_us, 1),
    }
    if decision.reason:
        args["reason"] = decision.reason
    if decision.scores:
        best = max(decision.scores, key=lambda score: score.tokens_per_us)
        args["best_mode"] = "plain" if best.mode is None else best.mode.value
        args["best_tokens_per_ms"] = round(1e3 * best.tokens_per_us, 3)
    return args
