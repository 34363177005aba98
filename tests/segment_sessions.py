"""Segments of runtime onnxruntime run as bare sessions, with attention in numpy between their parts.

Every input is given by name, every output of the segment comes back.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from faser_backend.core.batch import RowBatch
from faser_backend.manifest import ModelEngine


class SegmentSessions:
    """A model with pools of its own, filled with noise: what is read beyond a context has to show."""

    def __init__(self, model: ModelEngine, directory: Path, num_blocks: int, block_size: int) -> None:
        self.model = model
        self._block_size = block_size
        self._parts = [
            [ort.InferenceSession(directory / file.name, providers=["CPUExecutionProvider"]) for file in segment.files]
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
        values = given if rows is None else given | self._feeds(rows)
        for part, session in enumerate(self._parts[segment]):
            if part:
                assert rows is not None
                layer = described.first_layer + part - 1
                values[f"attended.{layer}"] = self._attend(layer, rows, *(values[f"{name}.{layer}"] for name in "qkv"))
            names = [tensor.name for tensor in session.get_outputs()]
            found = session.run(names, {tensor.name: values[tensor.name] for tensor in session.get_inputs()})
            values |= {name: np.asarray(array) for name, array in zip(names, found, strict=True)}
        return {tensor.name: values[tensor.name] for tensor in described.outputs}

    def run_all(self, rows: RowBatch) -> dict[str, np.ndarray]:
        """Every segment in order; the outputs of all of them."""
        outputs: dict[str, np.ndarray] = {}
        for segment in range(len(self.model.segments)):
            before = {"hidden": outputs["hidden_out"]} if segment else {}
            outputs |= self.run(segment, rows, **before)
        return outputs

    def _feeds(self, rows: RowBatch) -> dict[str, np.ndarray]:
        counts = rows.rows_per_sequence
        positions = np.arange(rows.num_rows) + np.repeat(rows.context_lens - rows.cu_rows[:-1], counts)
        return {"token_ids": rows.token_ids, "positions": positions, "logit_rows": rows.logit_rows}

    def _attend(self, layer: int, rows: RowBatch, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        spec, size = self.model.spec, self._block_size
        key_pool, value_pool = self.pools[f"k_pool.{layer}"], self.pools[f"v_pool.{layer}"]
        attended = np.empty((rows.num_rows, spec.num_heads, spec.head_dim), np.float32)
        for index, context in enumerate(rows.context_lens):
            for row in range(rows.cu_rows[index], rows.cu_rows[index + 1]):
                positions = np.arange(context + row - rows.cu_rows[index] + 1)
                block, offset = rows.block_tables[index, positions // size], positions % size
                key_pool[:, block[-1], offset[-1]], value_pool[:, block[-1], offset[-1]] = k[row, :, 0], v[row, :, 0]
                keys, values = key_pool[:, block, offset], value_pool[:, block, offset]  # [Hkv, n, head_dim]
                queries = q[row].reshape(spec.num_kv_heads, -1, spec.head_dim)
                scores = queries @ keys.transpose(0, 2, 1) * spec.head_dim**-0.5
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                mixed = weights / weights.sum(axis=-1, keepdims=True) @ values
                attended[row] = mixed.reshape(spec.num_heads, spec.head_dim)
        return attended.reshape(rows.num_rows, -1)
