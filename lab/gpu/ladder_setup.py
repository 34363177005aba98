"""What the policies of a ladder are told: costs of calls, overhead of steps, the planted process."""

from __future__ import annotations

from typing import Any

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.device.partition import split_name
from faser_backend.policy.cost_model import CostModel
from faser_backend.policy.speculation import Knowledge
from lab.gpu.calls import PairCalls
from lab.gpu.contestants import FIXED, Contestant, Sizes
from lab.gpu.costs import fit_costs, measure_exit, measure_points, with_overhead
from lab.gpu.ladder import Ladder
from lab.gpu.predictions import step_us
from lab.gpu.worker import Context
from lab.simulation.acceptance import AcceptanceProcess
from lab.simulation.knowledge import knowledge_of

LANE_REPEATS = 30


class CallCosts:
    """Costs of calls of a pair, of an exit and of lanes: all that is measured before engines take the slots."""

    def __init__(self, context: Context, calls: PairCalls, pair: str) -> None:
        latency = context.result_of("latency")
        is_measured = latency.get("pair") == pair and bool(latency.get("points"))
        points = latency["points"] if is_measured else self._measure(calls)
        self.model = fit_costs(points, calls.runtime.kv_block_size, calls.models.max_context)
        segments = calls.models.target.segments
        self.exits = tuple((i, each.last_layer) for i, each in enumerate(segments) if each.has_exit_scores)
        self.exit_us = (0.0, 0.0)
        if self.exits:
            self.exit_us = measure_exit(calls, (1, max(1, calls.max_num_seqs // 2)), 3)
        lanes = next((place.lanes for place in calls.partitions.values() if place.lanes is not None), None)
        self.lanes_us = 0.0
        if lanes is not None:
            self.lanes_us = calls.lanes_us(lanes, LANE_REPEATS)

    @staticmethod
    def _measure(calls: PairCalls) -> list[dict[str, Any]]:
        """A few calls of the whole device and of the split that the runtime holds to be the best."""
        chosen = [WHOLE, *(split_name(*split) for split in calls.runtime.splits[:1])]
        return [point for name in chosen for point in measure_points(calls, name, 2, calls.max_num_seqs)]


def knowledge(costs: CallCosts, ladder: Ladder, max_num_seqs: int, process: AcceptanceProcess) -> Knowledge:
    """Runs steps of a fixed length, whose time beyond their calls is overhead."""
    steps = measured_steps(costs.model, ladder, max_num_seqs)
    model = with_overhead(costs.model, steps, costs.exit_us, costs.lanes_us)
    return knowledge_of(process, model, costs.exits)


def measured_steps(costs: CostModel, ladder: Ladder, max_num_seqs: int) -> np.ndarray:
    """[n, 3]: sequences, rows and microseconds beyond the calls, of steps in which every sequence drafts."""
    fixed = Contestant(FIXED, "overhead")
    steps = []
    for num_clients in sorted({1, max(2, max_num_seqs // 4), max_num_seqs}):
        ladder.closed([fixed], Sizes((num_clients,), 16, 24, 1, 1, 0.0), num_clients)
        if fixed.name not in ladder.logs:
            break
        for note in ladder.logs[fixed.name].notes:
            if len(note.sequences) == num_clients and note.num_drafted.min() > 0:
                calls_us = step_us(costs, num_clients, int(note.num_drafted.max()), float(note.num_tokens.mean()))
                spent_us = (note.end_ns - note.start_ns) / 1e3
                steps.append((num_clients, int(note.num_rows.sum()), spent_us - calls_us))
    if not steps:
        raise RuntimeError(f"no step of {fixed.name} could be timed: {'; '.join(ladder.missing) or 'none drafted'}")
    return np.array(steps, np.float64)
