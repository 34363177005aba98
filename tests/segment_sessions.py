"""Segments of runtime onnxruntime run as bare sessions: every input is given by name, every output comes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from faser_backend.core.batch import RowBatch
from faser_backend.manifest import ModelEngine


class SegmentSessions:
    """A model with pools of its own, filled with noise: what a graph reads beyond a context has to show."""

    def __init__(self, model: ModelEngine, directory: Path, num_blocks: int, block_size: int) -> None:
        self.model = model
        self._block_size = block_size
        self._sessions = [
            ort.InferenceSession(directory / segment.file.name, providers=["CPUExecutionProvider"])
            for segment in model.segments
        ]
        filler, spec = np.random.default_rng(9), model.spec
        shape = (spec.num_kv_heads, num_blocks, block_size, spec.head_dim)
        self.pools = {
            f"{name}_pool.{layer}": filler.normal(size=shape).astype(np.float32)
            for layer in range(spec.num_layers)
            for name in "kv"
        }

    def run(self, segment: int, rows: RowBatch | None, **given: np.ndarray) -> dict[str, np.ndarray]:
        """Outputs by name. The pools have the new rows afterwards. rows: None for a segment without layers."""
        described = self.model.segments[segment]
        feeds = given | self.pools | ({} if rows is None else self._feeds(rows))
        names = [tensor.name for tensor in described.outputs]
        found = self._sessions[segment].run(names, {tensor.name: feeds[tensor.name] for tensor in described.inputs})
        outputs = {name: np.asarray(array) for name, array in zip(names, found, strict=True)}
        for name in [name for name in outputs if "_pool_out." in name]:
            self.pools[name.replace("_out", "")] = outputs.pop(name)
        return outputs

    def run_all(self, rows: RowBatch) -> dict[str, np.ndarray]:
        """Every segment in order; the outputs of all of them."""
        outputs: dict[str, np.ndarray] = {}
        for segment in range(len(self.model.segments)):
            before = {"hidden": outputs["hidden_out"]} if segment else {}
            outputs |= self.run(segment, rows, **before)
        return outputs

    def _feeds(self, rows: RowBatch) -> dict[str, np.ndarray]:
        counts, num_heads = rows.rows_per_sequence, self.model.spec.num_kv_heads
        sequence = np.repeat(np.arange(counts.shape[0]), counts)
        offset = np.arange(rows.num_rows) - rows.cu_rows[sequence]
        width = int(counts.max())
        positions = rows.context_lens[sequence] + offset
        block, cell = np.divmod(positions, self._block_size)
        kv_slots = np.empty((rows.num_rows, num_heads, 1, 3), np.int64)
        kv_slots[..., 0] = np.arange(num_heads)[:, None]
        kv_slots[..., 1] = rows.block_tables[sequence, block][:, None, None]
        kv_slots[..., 2] = cell[:, None, None]
        return {
            "token_ids": rows.token_ids,
            "positions": positions,
            "pad_idx": np.minimum(rows.cu_rows[:-1, None] + np.arange(width), rows.cu_rows[1:, None] - 1),
            "unpad_idx": sequence * width + offset,
            "block_table": rows.block_tables,
            "columns": np.arange(rows.block_tables.shape[1] * self._block_size),
            "kv_slots": kv_slots,
            "logit_rows": rows.logit_rows,
        }
