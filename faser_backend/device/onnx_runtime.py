"""`OrtRunner`: a compiled model on ONNX Runtime with its KV pool; implements core.ports.ModelRunner.

A call copies a few small integers into buffers that ONNX Runtime already holds and runs the graph part by part;
between two parts a layer's attention is computed by a kernel of ours, which reads and writes the pool in place.
Buffers and bindings of a call shape are kept, so that a steady state allocates nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort

from faser_backend.core.batch import RowBatch
from faser_backend.core.errors import ConfigError
from faser_backend.device.call_shapes import BoundSegment, CallShape, ShapeCache, ShapeKey
from faser_backend.device.host_attention import HostAttention
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import ModelEngine

ERRORS_ONLY = 3
# A model this small is done before a second thread has woken: the demo draft takes 82 us a call on one
# thread and 122 us on two.
ONE_THREAD_BYTES = 8 << 20
SPIN_US = 100


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
        can_spin: bool = False,
        pool: KvPool | None = None,
    ) -> None:
        """pool: shared with another runner of the model; None makes one of num_blocks blocks.

        num_threads: at most that many threads, None = one per core of the partition. A model of up to
        ONE_THREAD_BYTES runs on one thread in any case.
        can_spin: helper threads of a call wait busily, up to SPIN_US and never between calls. With
        cores to spare small parallel ops finish in up to half the time; where others want the cores
        calls can take several times as long. Raises ConfigError for numbers out of range or where
        ONNX Runtime refuses a segment.
        """
        if num_threads is not None and num_threads < 1:
            raise ConfigError(f"num_threads = {num_threads}: must be at least 1")
        self.spec = model.spec
        self.partition = partition
        most_threads = useful_threads(model, partition)
        self.num_threads = min(num_threads or most_threads, most_threads)
        self.pool = pool or KvPool(model.spec, num_blocks, block_size)
        self.num_segments = len(model.segments)
        self.num_layers = tuple(segment.last_layer - segment.first_layer for segment in model.segments)
        self.exits = frozenset(index for index, segment in enumerate(model.segments) if segment.has_exit_scores)
        self.vocab_size = model.spec.vocab_size
        self.max_logit_rows: int | None = None  # graphs take any shape
        # Matrices of a small model are too small for a second thread, keys and values of a large batch are not.
        self._attention = HostAttention(model.spec, self.pool, min(num_threads or partition.size, partition.size))
        self._shapes: list[ShapeCache] = []
        for segment in model.segments:
            sessions = [_open_session(engine_dir / file.name, self.num_threads, can_spin) for file in segment.files]
            self._shapes.append(ShapeCache(BoundSegment(sessions, segment, model.spec, self.pool)))

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        """See core.ports.ModelRunner. The result is a buffer that the segment's next call overwrites."""
        shape = self._run(segment, rows, hidden, None)
        return shape.result[: rows.logit_rows.shape[0] if shape.is_last else rows.token_ids.shape[0]]

    def run_segment_with_scores(
        self, segment: int, rows: RowBatch, hidden: np.ndarray | None, exit_candidates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As run_segment, for a segment that ends at an exit layer.

        exit_candidates: [T, K] int64 token ids. Returns (hidden [T, hidden_size], scores [T, K]): the
        logits that the head would give the candidates if the model ended here.
        """
        assert self._shapes[segment].bound.segment.has_exit_scores, f"segment {segment} has no exit scores"
        shape = self._run(segment, rows, hidden, exit_candidates)
        num_rows = rows.token_ids.shape[0]
        return shape.result[:num_rows], shape.exit_scores[:num_rows]

    def take_rows(self, hidden: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """See core.ports.ModelRunner."""
        return hidden[kept]

    def check_integrity(self) -> None:
        self.pool.check_integrity()

    def close(self) -> None:
        """Frees sessions, buffers and threads; the runner cannot be used afterwards."""
        self._shapes.clear()
        self._attention.close()

    def _run(self, segment: int, rows: RowBatch, hidden: np.ndarray | None, candidates: np.ndarray | None) -> CallShape:
        counts = rows.rows_per_sequence
        num_logits = rows.logit_rows.shape[0]
        cache = self._shapes[segment]
        bound = cache.bound
        shape = cache.get(ShapeKey(rows.num_rows, num_logits, 0 if candidates is None else candidates.shape[1]))
        shape.fill(rows, counts, hidden, candidates)
        self._attention.begin(rows, counts)
        shape.run_part(0)
        for part, layer in enumerate(bound.layers, 1):
            is_wanted = num_logits > 0 or layer < self.spec.num_layers - 1
            self._attention.run(layer, shape.q, shape.k, shape.v, shape.attended, attends=is_wanted)
            shape.run_part(part)
        shape.keep_features(rows, counts, self.pool.kv_block_size)
        return shape


def useful_threads(model: ModelEngine, partition: CorePartition) -> int:
    """Threads that calls of the model gain from on this partition."""
    return 1 if model.num_weight_bytes <= ONE_THREAD_BYTES else partition.size


@cache
def _register_shared_arena() -> None:
    """One arena for the intermediate tensors of all sessions: segments that run in turn then work in the same,
    cached memory. With an arena each, a cut costs 7 to 8 % at 16 sequences; with this one 0 to 4 %."""
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, None)


def _open_session(path: Path, num_threads: int, can_spin: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    options.enable_mem_pattern = False  # it keeps a plan per shape for ever, and gains nothing here
    _register_shared_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")  # freed with the session
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(can_spin)))
    if can_spin:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
        options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise ConfigError(f"{path}: ONNX Runtime cannot load this segment ({error})") from error
