"""`LlvmHeadRunner`: an EAGLE-3 head whose layer is a kernel of ours; implements core.ports.TreeHeadRunner.

The target's runner writes the hidden states that the head reads to its own pool, by block and offset like keys and
values. A head without an embedding reads its target's, from the file that holds it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.cpu.kernels.products import product_kernel
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.runner import LlvmRunner, places_of
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import ModelEngine

LAYER = 1  # segment of a head; segment 0 joins features


class LlvmHeadRunner(LlvmRunner):
    """As LlvmRunner, for a pool whose `features` are those of the target's pool."""

    def __init__(
        self,
        model: ModelEngine,
        engine_dir: Path,
        partition: CorePartition,
        pool: KvPool,
        target: ModelEngine,
        *,
        num_threads: int | None = None,
    ) -> None:
        """Arguments and errors as of LlvmRunner."""
        super().__init__(model, engine_dir, partition, pool, num_threads=num_threads, lender=target)
        token_ids = self._weights.vector("token_ids", np.int64)
        assert token_ids is not None, "a head says which ids its logits are of"
        is_known = token_ids < self.vocab_size  # padding rows of the vocabulary have been cut
        self._token_ids, self._known = token_ids[is_known], np.flatnonzero(is_known)
        self._is_whole = np.array_equal(token_ids, np.arange(self.vocab_size))
        self._num_logits = token_ids.size
        self._join = product_kernel(model.weight_format.name)
        num_features = len(target.spec.feature_layers) * target.spec.hidden_size
        self._most_inputs = max(self._most_inputs, 2 * self.spec.hidden_size, num_features)

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        """Segment 0 joins the features that lie at the rows' positions, [T, hidden_size]; segment 1 gives logits."""
        if segment == LAYER:
            assert hidden is not None
            return self.run_layer(rows, hidden)[0]
        blocks, offsets = places_of(rows, self.pool.kv_block_size)
        features = np.concatenate([of_layer[blocks, offsets] for of_layer in self.pool.features.values()], axis=1)
        joined = self._workspace.view("joined", rows.num_rows, self.spec.hidden_size)
        arrays = (joined, features, self._weights.data, self._weights.offset("fc"))
        strips = [self._strip(thread) for thread in range(self.num_threads)]
        calls = [(thread, self.num_threads, *arrays, strip) for thread, strip in enumerate(strips)]
        self._on_all_threads(self._join, calls)
        return joined

    def run_layer(self, rows: RowBatch, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See core.ports.HeadRunner."""
        results = self._run(LAYER, rows, hidden, None)
        return self._over_all_ids(results.logits), results.hidden[: rows.logit_rows.size]

    def join_rows(self, pieces: list[np.ndarray]) -> np.ndarray:
        """See core.ports.TreeHeadRunner."""
        return np.concatenate(pieces)

    def _over_all_ids(self, logits: np.ndarray) -> np.ndarray:
        """[R, vocab_size] of logits [R, num_logits]: -inf at ids that the head does not know."""
        if self._is_whole:
            return logits
        every = self._workspace.view("every_logit", logits.shape[0], self.vocab_size)
        every.fill(-np.inf)
        every[:, self._token_ids] = logits[:, self._known]
        return every

    def _extras(self, thread: int, num_rows: int) -> tuple[np.ndarray, ...]:
        width = self.spec.hidden_size
        embedded = self._workspace.view("embedded", num_rows, width)
        return embedded, self._own[thread].view("both", num_rows, 2 * width), self._embedding_file.data
