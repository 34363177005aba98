"""One whole forward pass: the segments of a model in order."""

from __future__ import annotations

from faser_backend.core.batch import RowBatch
from faser_backend.core.ports import DeviceArray, ModelRunner


def run_model(runner: ModelRunner, rows: RowBatch) -> DeviceArray:
    """Returns logits [R, V] of rows.logit_rows; the rows' K/V are in the runner's pool afterwards."""
    output = runner.run_segment(0, rows, None)
    for segment in range(1, runner.num_segments):
        output = runner.run_segment(segment, rows, output)
    return output
