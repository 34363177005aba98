"""Options of a TensorRT engine: limits of calls, devices, and one optimisation profile per bucket of calls.

An engine accepts the shapes of its profiles and is tuned for each profile's usual shape. Every bucket is within
the last one, so that the largest allowed call has a profile. Needs no TensorRT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from faser_backend.core.model import ModelSpec
from faser_backend.manifest import BucketSpec, TensorSpec

DEFAULT_MAX_CONTEXT = 4096
MAX_VERIFY_ROWS = 16  # of one sequence: the drafts of adaptive policies and the anchor, rounded up
MAX_CANDIDATES = 64  # of one row, for exit scores
MAX_ELEMENTS = (1 << 31) - 1  # of a tensor
USUAL_NUM_SEQS = 8
USUAL_VERIFY_ROWS = 5
USUAL_CONTEXT = 512
Range = tuple[int, int, int]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The largest calls that an engine accepts, and thus limits of `faser serve`.

    max_context: prompt + output tokens of a sequence; None = the model's limit, at most DEFAULT_MAX_CONTEXT.
    """

    max_num_seqs: int = 32
    max_context: int | None = None
    max_prefill_tokens: int = 256

    def apply(self, spec: ModelSpec) -> ModelSpec:
        """Returns the spec with the context that its engines accept."""
        return replace(spec, max_context=min(spec.max_context, self.max_context or DEFAULT_MAX_CONTEXT))


class SplitStreams(NamedTuple):
    """Handles of CUDA streams, each in the green context of one model's share."""

    draft: int
    target: int


@dataclass(frozen=True, slots=True)
class TensorRtOptions:
    """Calls and devices that engines are compiled for.

    compute_capabilities: e.g. ("8.9", "12.0"), only for TensorRT-RTX; () = its default. split_streams: CUDA streams
    on each model's share by the name of the SM split, e.g. "16/116"; only for full TensorRT with a GPU.
    allows_pool_copies: an engine that copies KV pools, or may, is a warning instead of an error.
    """

    limits: CallLimits = field(default_factory=CallLimits)
    compute_capabilities: tuple[str, ...] = ()
    split_streams: Mapping[str, SplitStreams] = field(default_factory=dict)
    allows_pool_copies: bool = False


def call_buckets(
    spec: ModelSpec, kv_block_size: int, limits: CallLimits, splits: Sequence[str] = ("",)
) -> tuple[BucketSpec, ...]:
    """Returns the buckets decode, verify and prefill for each split. spec: as it is served."""
    most_seqs, most_prefill = limits.max_num_seqs, limits.max_prefill_tokens
    usual_seqs = min(USUAL_NUM_SEQS, most_seqs)
    most_verify = most_seqs * MAX_VERIFY_ROWS
    rows_of_calls: dict[str, tuple[Range, Range, Range]] = {  # B, Q, T
        "decode": ((1, usual_seqs, most_seqs), (1, 1, 1), (1, usual_seqs, most_seqs)),
        "verify": (
            (1, usual_seqs, most_seqs),
            (1, USUAL_VERIFY_ROWS, MAX_VERIFY_ROWS),
            (1, usual_seqs * USUAL_VERIFY_ROWS, most_verify),
        ),
        "prefill": (
            (1, 1, most_seqs),
            (1, most_prefill, max(most_prefill, MAX_VERIFY_ROWS)),
            (1, most_prefill, max(most_prefill, most_verify)),
        ),
    }
    most_blocks = -(-spec.max_context // kv_block_size)
    usual_blocks = min(-(-USUAL_CONTEXT // kv_block_size), most_blocks)
    pool_blocks = max(MAX_ELEMENTS // (spec.num_kv_heads * kv_block_size * spec.head_dim), 1)
    buckets = []
    for split in splits:
        for name, (sequences, queries, rows) in rows_of_calls.items():
            ranges: dict[str, Range] = {
                "B": sequences,
                "Q": queries,
                "T": rows,
                "MB": (1, usual_blocks, most_blocks),
                "S": (kv_block_size, usual_blocks * kv_block_size, most_blocks * kv_block_size),
                "NB": (1, min(most_seqs * most_blocks, pool_blocks), pool_blocks),
                "R": (0, min(rows[1], most_verify), min(rows[2], most_verify)),
                "K": (0, USUAL_NUM_SEQS, MAX_CANDIDATES),
            }
            ranges["B + 1"] = tuple(size + 1 for size in sequences)  # pyright: ignore[reportArgumentType]
            buckets.append(BucketSpec(name, ranges, split))
    return tuple(buckets)


def narrowed(bucket: BucketSpec, inputs: Sequence[TensorSpec]) -> BucketSpec:
    """Returns the bucket with only the dimensions of the inputs."""
    used = {size for tensor in inputs for size in tensor.shape}
    return replace(bucket, ranges={name: sizes for name, sizes in bucket.ranges.items() if name in used})


def shapes_of(tensor: TensorSpec, bucket: BucketSpec) -> tuple[Shape, Shape, Shape]:
    """Returns the smallest, usual and largest shape of an input."""
    sizes = [bucket.ranges[size] if isinstance(size, str) else (size,) * 3 for size in tensor.shape]
    least, usual, most = (tuple(size[end] for size in sizes) for end in range(3))
    return least, usual, most
