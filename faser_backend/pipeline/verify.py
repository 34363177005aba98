"""The verify and accept phases: the target scores a frontier, acceptance decides what is emitted.

Between target segments a pruner may end chains early: their last rows leave the batch, and with them the
work of the deeper layers. What a pruned row left in the shallow layers' KV is overwritten before it is read.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.decision import ExitView, Pruner
from faser_backend.core.frontier import Acceptance, Frontier, Verification
from faser_backend.core.ports import DeviceArray, ModelRunner, PhaseTimes, Sampler
from faser_backend.pipeline.acceptance import PURPOSE_ACCEPT, PURPOSE_RECOVER, accept_by_rejection, accept_matches
from faser_backend.pipeline.rows import DecodeBatch, keep_rows, mixed_rows, run_model, verify_rows, verify_sampling_rows


class Verifier:
    """Verifies with one runner at a time."""

    def __init__(self, sampler: Sampler, times: PhaseTimes) -> None:
        self._sampler, self._times = sampler, times

    def verify(
        self, runner: ModelRunner, batch: DecodeBatch, frontier: Frontier, pruner: Pruner | None
    ) -> Verification:
        """Runs the rows of a frontier through the target; the pruner may remove rows between segments, but not in a
        call that reads prompts too: that saves more."""
        rows, prompts = verify_rows(batch, frontier), batch.prompts
        self._times.lap("target_rows")
        if pruner is None or prompts is not None or frontier.candidates is None or not pruner.exits & runner.exits:
            logits = run_model(runner, rows if prompts is None else mixed_rows(rows, prompts))
            self._times.lap("target_model")
            return Verification(logits, rows.cu_rows, frontier.num_rows, rows.num_rows * sum(runner.num_layers))
        return self._verify_with_exits(runner, batch, frontier, rows, pruner)

    def _verify_with_exits(
        self, runner: ModelRunner, batch: DecodeBatch, frontier: Frontier, rows: RowBatch, pruner: Pruner
    ) -> Verification:
        exits, named = pruner.exits & runner.exits, frontier.candidates
        assert named is not None, "an exit scores candidates"
        output: DeviceArray | None = None
        num_kept = frontier.num_rows
        num_row_layers = 0
        for segment, num_layers in enumerate(runner.num_layers):
            num_row_layers += rows.num_rows * num_layers
            if segment not in exits or rows.num_rows == len(batch):  # anchors are never pruned
                output = runner.run_segment(segment, rows, output)
                self._times.lap("target_model")
                continue
            drawing = verify_sampling_rows(batch, frontier, rows.cu_rows)
            # Row j of a sequence scores those for draft token j + 1, a bonus row any: [T, C].
            candidates = named[drawing.sequence, np.minimum(drawing.num_drafted, named.shape[1] - 1)]
            self._times.lap("target_rows")
            output, scores = runner.run_segment_with_scores(segment, rows, output, candidates)
            self._times.lap("target_model")
            margins = self._exit_margins(frontier, drawing, candidates, scores)
            kept = pruner.keep(ExitView(segment, margins, frontier, num_kept, batch.slots))
            if (kept < num_kept).any():
                num_kept = kept
                rows, kept_rows = keep_rows(rows, kept)
                output = runner.take_rows(output, kept_rows)
            self._times.lap("exit")
        assert output is not None, "a model has at least one segment"
        return Verification(output, rows.cu_rows, num_kept, num_row_layers)

    def _exit_margins(
        self, frontier: Frontier, drawing: SamplingRows, candidates: np.ndarray, scores: DeviceArray
    ) -> np.ndarray:
        """Returns the leads [B, K] of the draft tokens in scores [T, C] of candidates [T, C]; see ExitView."""
        is_match = frontier.draft_probs is None
        leads = self._sampler.candidate_margins(scores, candidates, drawing, with_noise=is_match)
        sequence, column = drawing.sequence, drawing.num_drafted
        tests = np.flatnonzero(column < frontier.num_drafted[sequence])  # all but the bonus rows
        margins = np.zeros(frontier.drafted.shape, np.float32)
        margins[sequence[tests], column[tests]] = leads[tests]
        return margins

    def accept(self, batch: DecodeBatch, frontier: Frontier, verification: Verification) -> Acceptance:
        """Accepts by sample-and-match, or by rejection sampling if the frontier carries draft probabilities."""
        sampler, cu_rows = self._sampler, verification.cu_rows
        rows = verify_sampling_rows(batch, frontier, cu_rows)
        if frontier.draft_probs is None:
            return accept_matches(frontier, sampler.sample(verification.logits, rows), cu_rows)
        rounds = batch.rounds[rows.sequence]
        return accept_by_rejection(
            frontier,
            sampler.probabilities(verification.logits, rows),
            cu_rows,
            sampler.uniforms(rows, PURPOSE_ACCEPT, rounds),
            sampler.uniforms(rows, PURPOSE_RECOVER, rounds),
        )
