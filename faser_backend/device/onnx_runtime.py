"""`OrtRunner`: a compiled model on ONNX Runtime with its KV pool; implements core.ports.ModelRunner.

A call copies a few small integers into buffers that ONNX Runtime already holds and runs the graph.
Buffers and bindings of a call shape are kept, so that a steady state allocates nothing; the graph
writes new keys and values into the pool itself.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort

from faser_backend.core.batch import RowBatch
from faser_backend.core.errors import ConfigError
from faser_backend.device.call_shapes import (
    BoundSegment,
    CallShape,
    ShapeCache,
    ShapeKey,
    bucketed_blocks,
    bucketed_rows,
)
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
        self._fewest_queries = fewest_queries(model)
        self._block_size = self.pool.kv_block_size
        self._shapes: list[ShapeCache] = []
        for segment in model.segments:
            session = _open_session(engine_dir / segment.file.name, self.num_threads, can_spin)
            self._shapes.append(ShapeCache(BoundSegment(session, segment, model.spec, self.pool)))

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
        """Frees sessions and buffers; the runner cannot be used afterwards."""
        self._shapes.clear()

    def _run(self, segment: int, rows: RowBatch, hidden: np.ndarray | None, candidates: np.ndarray | None) -> CallShape:
        cu_rows = rows.cu_rows
        counts = cu_rows[1:] - cu_rows[:-1]
        num_tokens = int((rows.context_lens + counts).max())
        num_rows, num_logits = rows.token_ids.shape[0], rows.logit_rows.shape[0]
        num_sequences, max_rows = counts.shape[0], max(int(counts.max()), self._fewest_queries)
        is_exact = num_rows == num_sequences * max_rows
        key = ShapeKey(
            num_rows if is_exact else bucketed_rows(num_rows),
            num_sequences,
            max_rows,
            bucketed_blocks(-(-num_tokens // self._block_size)),
            bucketed_rows(num_logits) if num_logits == num_rows and not is_exact else num_logits,
            0 if candidates is None else candidates.shape[1],
            is_exact,
        )
        shape = self._shapes[segment].get(key)
        shape.run(rows, counts, hidden, candidates)
        return shape


def useful_threads(model: ModelEngine, partition: CorePartition) -> int:
    """Threads that calls of the model gain from on this partition."""
    return 1 if model.num_weight_bytes <= ONE_THREAD_BYTES else partition.size


def fewest_queries(model: ModelEngine) -> int:
    """Query rows that attention computes for each KV head and sequence at least.

    ONNX Runtime sums the product of a single row otherwise than that of several, in the last bits, which 8-bit
    products make 10,000 times as large. With two rows at least (+5 to +11 % of a decoding call) a row of logits has
    the same bits in every call shape. Grouped heads are several rows anyway.
    """
    has_single_rows = model.spec.num_heads == model.spec.num_kv_heads
    return 2 if has_single_rows and model.weight_format.name == "int8" else 1


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
