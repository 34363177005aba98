"""`OrtRunner`: a model's graphs on ONNX Runtime, the reference for kernels; implements core.ports.ModelRunner.

A graph is run part by part on one thread; between two parts a layer's attention is a call of our kernel, which reads
and writes the KV pool in place. `OrtHeadRunner` is the same of an EAGLE-3 head, which reads hidden states that the
target's runner left in its pool.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.errors import ConfigError
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.llvm_head import LAYER
from faser_backend.device.llvm_runner import NO_ROWS, check_blocks, places_of, readable_dtype
from faser_backend.device.llvm_weights import useful_threads
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import ModelEngine
from plugins.onnxruntime_import import onnxruntime as ort

ERRORS_ONLY = 3
FEATURE = "aux_hidden."  # begins the name of a hidden state that a draft head reads; its layer follows

Arrays = dict[str, np.ndarray]


class OrtRunner:
    """Runs the segments of one model. Calls are serial; runners that share a pool take turns or slots."""

    def __init__(
        self,
        model: ModelEngine,
        engine_dir: Path,
        num_blocks: int,
        block_size: int,
        partition: CorePartition,
        *,
        num_threads: int | None = None,
        pool: KvPool | None = None,
    ) -> None:
        """pool: shared with another runner of the model; None makes one of num_blocks blocks. num_threads: at most this
        many of the partition's cores multiply matrices; a small model's are multiplied on one. Raises ConfigError for
        numbers out of range and where ONNX Runtime refuses a segment."""
        if num_threads is not None and num_threads < 1:
            raise ConfigError(f"num_threads = {num_threads}: must be at least 1")
        self.spec, self.partition = model.spec, partition
        most_threads = useful_threads(model, partition)
        self.num_threads = min(num_threads or most_threads, most_threads)
        self.pool = pool or KvPool(model.spec, num_blocks, block_size)
        self.num_segments = len(model.segments)
        self.num_layers = tuple(segment.last_layer - segment.first_layer for segment in model.segments)
        self.exits = frozenset(index for index, segment in enumerate(model.segments) if segment.has_exit_scores)
        self.vocab_size = model.spec.vocab_size
        self.max_logit_rows: int | None = None  # graphs take any shape
        from plugins.host_attention import attention_kernel  # not above: it loads numba

        dtype = readable_dtype(self.pool)
        self._attend = attention_kernel(model.spec.head_dim, dtype)
        self._bits = np.uint16 if dtype == "fp16" else np.float32
        self._segments = model.segments
        self._sessions = [
            [_open_session(engine_dir / file.name, self.num_threads) for file in segment.files]
            for segment in model.segments
        ]

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        """See core.ports.ModelRunner."""
        values = self._run(segment, rows, hidden)
        return values["logits"] if segment == self.num_segments - 1 else values["hidden_out"]

    def run_segment_with_scores(
        self, segment: int, rows: RowBatch, hidden: np.ndarray | None, exit_candidates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As run_segment, for a segment that ends at an exit layer.

        exit_candidates: [T, K] int64 token ids. Returns (hidden [T, hidden_size], scores [T, K]): the logits that the
        head would give the candidates if the model ended here.
        """
        assert segment in self.exits, f"segment {segment} has no exit scores"
        values = self._run(segment, rows, hidden, exit_candidates)
        return values["hidden_out"], values["exit_scores"]

    def take_rows(self, hidden: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """See core.ports.ModelRunner."""
        return hidden[kept]

    def check_integrity(self) -> None:
        self.pool.check_integrity()

    def close(self) -> None:
        """Frees the sessions; the runner cannot be used afterwards."""
        self._sessions.clear()

    def _run(
        self, segment: int, rows: RowBatch, hidden: np.ndarray | None, candidates: np.ndarray | None = None
    ) -> Arrays:
        """All that the segment's parts were given and gave, by the names of their graphs."""
        assert rows.tree is None, "refused where policies are made"
        counts, spec = rows.rows_per_sequence, self.spec
        check_blocks(self.pool, rows.block_tables, int((rows.context_lens + counts).max()))
        nobody = np.zeros((rows.num_rows, 0), np.int64)
        values: Arrays = {
            "token_ids": rows.token_ids,
            "positions": rows.positions,
            "logit_rows": rows.logit_rows,
            "exit_candidates": nobody if candidates is None else candidates,
        }
        if hidden is not None:
            values["hidden"] = hidden
        first, *later = self._sessions[segment]
        _run_part(first, values)
        for layer, session in enumerate(later, self._segments[segment].first_layer):
            is_wanted = rows.logit_rows.size > 0 or layer < spec.num_layers - 1
            values[f"attended.{layer}"] = self._attended(layer, rows, values, attends=is_wanted)
            _run_part(session, values)
        self._keep_features(rows, values)
        return values

    def _attended(self, layer: int, rows: RowBatch, values: Arrays, *, attends: bool) -> np.ndarray:
        """[T, H * head_dim] of the layer's queries; its keys and values go to the pool. Zeros unless somebody wants
        them."""
        from plugins.host_attention import TILE_ROWS, scratch_width

        spec, block_size = self.spec, self.pool.kv_block_size
        heads = ((name, spec.num_heads if name == "q" else spec.num_kv_heads) for name in "qkv")
        q, k, v = (values[f"{name}.{layer}"].reshape(-1, num_heads, spec.head_dim) for name, num_heads in heads)
        out = np.zeros_like(q)
        self._attend(
            *map(np.ascontiguousarray, (q, k, v)),
            self.pool.keys(layer).view(self._bits),
            self.pool.values(layer).view(self._bits),
            *map(np.ascontiguousarray, (rows.block_tables, rows.cu_rows, rows.context_lens)),
            NO_ROWS,  # no trees
            NO_ROWS,
            out,
            np.empty((TILE_ROWS, scratch_width(rows.block_tables.shape[1] * block_size)), np.float32),
            np.empty((block_size, spec.head_dim), np.float32),
            0,
            rows.context_lens.size * spec.num_kv_heads,
            np.float32(spec.head_dim**-0.5),
            attends,
        )
        return out.reshape(-1, spec.num_heads * spec.head_dim)

    def _keep_features(self, rows: RowBatch, values: Arrays) -> None:
        """What a draft head reads of each row goes to where the row's keys and values lie."""
        if names := [name for name in values if name.startswith(FEATURE)]:
            places = places_of(rows, self.pool.kv_block_size)
            for name in names:
                self.pool.features[int(name.removeprefix(FEATURE))][places] = values[name]


class OrtHeadRunner(OrtRunner):
    """As OrtRunner, for a pool whose `features` are those of the target's pool."""

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        """Segment 0 joins the features that lie at the rows' positions, [T, hidden_size]; segment 1 gives logits."""
        if segment == LAYER:
            assert hidden is not None
            return self.run_layer(rows, hidden)[0]
        places = places_of(rows, self.pool.kv_block_size)
        values = {f"{FEATURE}{layer}": array[places] for layer, array in self.pool.features.items()}
        _run_part(self._sessions[0][0], values)
        return values["hidden_out"]

    def run_layer(self, rows: RowBatch, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See core.ports.HeadRunner."""
        values = self._run(LAYER, rows, hidden)
        return values["logits"], values["hidden_out"]


def _run_part(session: ort.InferenceSession, values: Arrays) -> None:
    """Adds the part's outputs to the values, of which it takes its inputs."""
    inputs = {tensor.name: values[tensor.name] for tensor in session.get_inputs()}
    names = [tensor.name for tensor in session.get_outputs()]
    values |= zip(names, map(np.asarray, session.run(names, inputs)), strict=True)


def _open_session(path: Path, num_threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # else threads keep cores between calls
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise ConfigError(f"{path}: ONNX Runtime cannot load this segment ({error})") from error
