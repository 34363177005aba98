"""`OrtHeadRunner`: an EAGLE-3 head on ONNX Runtime; implements core.ports.HeadRunner.

The target's runner writes the hidden states that the head reads to its own pool, by block and offset like keys and
values. Whoever holds a token's blocks holds its features: reused prefixes, chunks and rejected rows need no care.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.device.onnx_runtime import OrtRunner

JOIN, LAYER = 0, 1  # segments of a head


class OrtHeadRunner(OrtRunner):
    """As OrtRunner, for a pool whose `features` are those of the target's pool."""

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        """Segment 0 joins the features that lie at the rows' positions, [T, hidden_size]; segment 1 gives logits."""
        if segment == LAYER:
            assert hidden is not None
            return self.run_layer(rows, hidden)[0]
        counts = rows.rows_per_sequence
        sequence = np.repeat(np.arange(counts.size), counts)
        positions = rows.context_lens[sequence] + np.arange(sequence.size) - rows.cu_rows[sequence]
        block, offset = np.divmod(positions, self.pool.kv_block_size)
        blocks = rows.block_tables[sequence, block]
        features = {f"aux_hidden.{layer}": array[blocks, offset] for layer, array in self.pool.features.items()}
        return np.asarray(self._shapes[JOIN].bound.sessions[0].run(["hidden_out"], features)[0])

    def run_layer(self, rows: RowBatch, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See core.ports.HeadRunner."""
        shape = self._run(LAYER, rows, hidden, None)
        num_rows = rows.logit_rows.shape[0]
        return shape.result[:num_rows], shape.next_hidden[:num_rows]
