"""Runs TensorRT-RTX's segments in ONNX Runtime: they are plain ONNX, so their graph is checked without a GPU.

Calls are padded as a GPU runner pads them: more rows, sequences, rows per sequence and blocks than a batch has.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime as ort

from faser_backend.core.batch import RowBatch
from faser_backend.engines.checkpoint import FLOAT_TYPES
from faser_backend.engines.decoder import GraphForm, build_segment
from faser_backend.engines.families import read_spec
from faser_backend.engines.graph import WeightStore
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.weights import ModelWeights


@dataclass(frozen=True)
class Padding:
    rows: int = 0
    sequences: int = 0
    rows_per_sequence: int = 0
    blocks: int = 0


class GatheredRunner:
    """The parts of core.ports.ModelRunner that tests use; pools [2 * num_layers][Hkv, num_blocks, block, head_dim]."""

    def __init__(
        self,
        source: Path,
        directory: Path,
        *,
        exit_layers: tuple[int, ...] = (),
        num_blocks: int = 40,
        block_size: int = 4,
        dtype: str = "fp32",
        padding: Padding | None = None,
    ) -> None:
        checkpoint = open_checkpoint(source)
        self.spec = read_spec(checkpoint.fields)
        self.padding = padding or Padding()
        self._block_size = block_size
        self._sessions: list[ort.InferenceSession] = []
        directory.mkdir(parents=True, exist_ok=True)
        store = WeightStore(directory / "weights")
        cuts = (0, *exit_layers, self.spec.num_layers)
        weights = ModelWeights(checkpoint, self.spec, joins_experts=True)
        form = GraphForm("tensorrt_rtx", dtype, block_size)
        self.graphs = [
            build_segment(self.spec, weights, store, first, last, form=form) for first, last in pairwise(cuts)
        ]
        store.close()
        for index, graph in enumerate(self.graphs):
            path = directory / f"{index}.onnx"
            path.write_bytes(graph.model.SerializeToString())
            self._sessions.append(ort.InferenceSession(path, providers=["CPUExecutionProvider"]))
        self.num_segments = len(self.graphs)
        shape = (self.spec.num_kv_heads, num_blocks, block_size, self.spec.head_dim)
        layers = range(self.spec.num_layers)
        # Not zeros: a read beyond the context must be visible.
        filler = np.random.default_rng(9)
        self._pools = {
            f"{name}_pool.{layer}": filler.normal(size=shape).astype(FLOAT_TYPES[dtype])
            for layer in layers
            for name in "kv"
        }

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        return self.run_segment_with_scores(segment, rows, hidden, np.zeros((rows.num_rows, 1), np.int64))[0]

    def run_segment_with_scores(
        self, segment: int, rows: RowBatch, hidden: np.ndarray | None, exit_candidates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        graph, session = self.graphs[segment], self._sessions[segment]
        given = self._feeds(rows, exit_candidates)
        if hidden is not None:
            given["hidden"] = _padded(hidden, self.padding.rows)
        given.update(self._pools)
        names = [tensor.name for tensor in graph.outputs]
        found = session.run(names, {tensor.name: given[tensor.name] for tensor in graph.inputs})
        outputs = dict(zip(names, found, strict=True))
        self._write(rows, outputs)
        if "logits" in outputs:
            return outputs["logits"], None
        return outputs["hidden_out"][: rows.num_rows], outputs["exit_scores"][: rows.num_rows]

    def _feeds(self, rows: RowBatch, exit_candidates: np.ndarray) -> dict[str, np.ndarray]:
        counts, padding = np.diff(rows.cu_rows), self.padding
        sequence = np.repeat(np.arange(counts.shape[0]), counts)
        offset = np.arange(rows.num_rows) - rows.cu_rows[sequence]
        width = int(counts.max()) + padding.rows_per_sequence
        sources = np.minimum(rows.cu_rows[:-1, None] + np.arange(width), rows.cu_rows[1:, None] - 1)
        table = np.pad(rows.block_tables, ((0, padding.sequences), (0, padding.blocks)))
        return {
            "token_ids": _padded(rows.token_ids, padding.rows),
            "positions": _padded(rows.context_lens[sequence] + offset, padding.rows),
            "pad_idx": _padded(sources, padding.sequences),
            "unpad_idx": _padded(sequence * width + offset, padding.rows),
            "context_lens": _padded(rows.context_lens, padding.sequences),
            "block_table": table,
            "columns": np.arange(table.shape[1] * self._block_size),
            "logit_rows": rows.logit_rows,
            "exit_candidates": _padded(exit_candidates, padding.rows),
        }

    def _write(self, rows: RowBatch, outputs: dict[str, np.ndarray]) -> None:
        """Scatters the new keys and values to the pools, as a GPU runner does after the segment."""
        counts = np.diff(rows.cu_rows)
        sequence = np.repeat(np.arange(counts.shape[0]), counts)
        positions = rows.context_lens[sequence] + np.arange(rows.num_rows) - rows.cu_rows[sequence]
        block, offset = np.divmod(positions, self._block_size)
        blocks = rows.block_tables[sequence, block]
        for name, new in outputs.items():
            if "_new." in name:  # [T, Hkv, head_dim]
                pool = self._pools[name.replace("_new.", "_pool.")]
                pool[:, blocks, offset] = new[: rows.num_rows].swapaxes(0, 1)


def _padded(array: np.ndarray, num_more: int) -> np.ndarray:
    return np.pad(array, [(0, num_more)] + [(0, 0)] * (array.ndim - 1))
