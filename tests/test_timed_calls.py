"""Calls under a stopwatch, on a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import WHOLE
from faser_backend.core.ports import ModelRunner
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve, OverheadCost
from faser_backend.serving.profiling import timed_calls
from faser_backend.serving.profiling.timed_calls import TwiceRunner
from faser_backend.serving.runtimes import AnyRuntime


class ColdRunner:
    """Takes 3 ticks of the clock for a call after something else ran, 2 for the same call again."""

    num_segments, num_layers, exits, vocab_size = 1, (1,), frozenset[int](), 8

    def __init__(self) -> None:
        self.now = self.num_calls = 0

    def run_segment(self, segment: int, rows: RowBatch, hidden: Any) -> np.ndarray:
        self.now += 3 - self.num_calls % 2
        self.num_calls += 1
        return np.full(1, self.num_calls)


def rows(num_logit_rows: int) -> RowBatch:
    return RowBatch(
        np.zeros(2, np.int64),
        np.array([0, 2]),
        np.zeros(1, np.int64),
        np.zeros((1, 1), np.int64),
        np.arange(num_logit_rows),
    )


def test_calls_for_logits_are_made_twice_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    cold = ColdRunner()
    monkeypatch.setattr(timed_calls, "time", SimpleNamespace(perf_counter_ns=lambda: cold.now))
    runtime = SimpleNamespace(synchronize=lambda: None)
    twice = TwiceRunner(cast(ModelRunner, cold), cast(AnyRuntime, runtime))
    assert twice.run_segment(0, rows(2), None) == 2, "what the second call gave"
    twice.run_segment(0, rows(0), None)
    assert cold.num_calls == 4
    assert twice.ratios == [1.5], "a prompt is read, and not noted"


def test_the_ratio_is_the_targets_alone() -> None:
    nothing = Curve.from_slopes(np.zeros(1), 0.0, np.zeros(1))
    segments = {
        (model, WHOLE): (CallCost(Curve.from_slopes(np.zeros(1), 100.0, np.ones(1)), nothing),)
        for model in (TARGET, DRAFT)
    }
    overhead = OverheadCost(0.0, 0.0, 0.0, 0.0, 0.0)
    in_a_row = CostModel(segments, overhead, np.zeros(1), is_measured=True)
    in_steps = CostModel(segments, replace(overhead, target_ratio=1.25), np.zeros(1), is_measured=True)
    for model, ratio in ((TARGET, 1.25), (DRAFT, 1.0)):
        both = [float(costs.call_us(model, WHOLE, 10, 2, 0)) for costs in (in_a_row, in_steps)]
        assert both == pytest.approx([110.0, 110.0 * ratio])
