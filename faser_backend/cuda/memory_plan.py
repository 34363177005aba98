"""The uses of a GPU's memory, added up before anything is allocated; KV blocks get what the rest leaves.

Upper bounds from the shapes of calls; the two lines that are no sum of shapes, CUDA's own memory per graph and cuBLAS's
workspaces, are allowances. Knows manifests, no torch and no device: so it can be printed where there is no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from faser_backend.core.model import ModelSpec
from faser_backend.cuda.call_shapes import FILTER_ROWS, MAX_GRAPH_ROWS, PROMPT_ROWS, ROW_COUNTS
from faser_backend.manifest import ModelEngine

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
NODES_PER_LAYER = 10  # of a graph; more with biases and split contexts
NODES_PER_FEATURE = 3  # where a draft head reads what goes into a layer
NODES_BESIDE_LAYERS = 24
GRAPH_NODE_BYTES = 16 << 10  # an allowance for what CUDA keeps on the device for a node
WORKSPACE_BYTES = 32 << 20  # an allowance for each pair of a thread and a stream: what torch gives cuBLAS on sm_90
FILTER_BYTES = 60  # of a row and token while top-k and top-p sort: scores, copies, indices, sums in float64
MAX_PARTS_ROWS = 64  # rows of the largest call whose contexts are cut
# Rows of every call of a segment that is captured, scores at exits aside.
MENU = (*ROW_COUNTS, *(count for count in ROW_COUNTS if count >= PROMPT_ROWS))
FRAGMENT_SHARE = 0.04  # of what is left for KV blocks: allocators round up


@dataclass(frozen=True, slots=True)
class PlanLine:
    """Bytes on the device, and what they are for."""

    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`free_bytes` of a GPU: `lines` of it are spoken for, `kv_bytes` are left for KV pools."""

    free_bytes: int
    block_bytes: int  # of one KV block of both models
    lines: tuple[PlanLine, ...]

    @property
    def reserved_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    @property
    def kv_bytes(self) -> int:
        """0 where the lines alone take more than there is."""
        return max(0, int((self.free_bytes - self.reserved_bytes) * (1 - FRAGMENT_SHARE)))

    @property
    def num_blocks(self) -> int:
        return self.kv_bytes // self.block_bytes

    def report(self, kv_block_size: int) -> list[str]:
        """A line per purpose, in MiB."""
        num_tokens = self.num_blocks * kv_block_size
        left = f"KV blocks: at most {self.num_blocks} of {kv_block_size} tokens, {num_tokens} in all"
        lines = (PlanLine("free", self.free_bytes), *self.lines, PlanLine(left, self.kv_bytes))
        return [f"{line.num_bytes / 2**20:8.0f} MiB  {line.what}" for line in lines]


def plan_memory(
    models: Sequence[ModelEngine],
    *,
    dtype: str,
    kv_block_size: int,
    free_bytes: int,
    num_partitions: int,
    max_num_seqs: int,
    max_prefill_tokens: int,
    unloaded_bytes: int,
) -> MemoryPlan:
    """The plan of an engine of runtime torch; models: the target, then the draft if there is one.

    dtype: of the manifest. num_partitions: the whole device and its splits that are opened, each with runners of all
    models. unloaded_bytes: of weights that are still to be loaded.
    """
    specs = [model.spec for model in models]
    size = ELEMENT_BYTES[dtype]
    vocab = max(spec.vocab_size for spec in specs)
    inputs = sum(_input_bytes(model, size, kv_block_size) for model in models) * num_partitions
    largest = max(MAX_GRAPH_ROWS, max_prefill_tokens)
    activations = sum(_temporaries(specs, MAX_GRAPH_ROWS, size)) * num_partitions
    chunks = max(_temporaries(specs, largest, size)) if largest > MAX_GRAPH_ROWS else 0
    nodes = sum(_graph_nodes(model) for model in models) + _chain_nodes(specs[1:], max_num_seqs)
    nodes *= num_partitions
    num_streams = 1 + 4 * (num_partitions - 1)  # per split two streams, of its lanes' threads and of the one that steps
    lines = (
        PlanLine("weights", unloaded_bytes),
        PlanLine("logits", sum(MAX_GRAPH_ROWS * spec.vocab_size * 4 for spec in specs)),
        PlanLine("inputs of captured calls", inputs),
        PlanLine("temporaries of captured calls", activations),
        PlanLine("temporaries of larger prompt chunks", chunks),
        PlanLine("scores, and top-k and top-p of some rows at once", sampler_bytes(vocab, len(models))),
        PlanLine("graphs (allowance)", nodes * GRAPH_NODE_BYTES),
        PlanLine("cuBLAS workspaces (allowance)", num_streams * WORKSPACE_BYTES),
    )
    return MemoryPlan(free_bytes, sum(block_bytes(spec, kv_block_size, size) for spec in specs), lines)


def block_bytes(spec: ModelSpec, kv_block_size: int, size: int) -> int:
    """Bytes of one KV block of a model: keys and values of all layers, and what a draft head reads of each token."""
    kv = spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim
    return kv_block_size * (kv + len(spec.feature_layers) * spec.hidden_size) * size


def activation_bytes(spec: ModelSpec, num_rows: int, size: int) -> int:
    """Temporaries of one layer of a call, and what it hands to the next: no more is alive at once."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    per_row = 4 * spec.hidden_size + 2 * heads + 2 * spec.num_heads * spec.head_dim + 3 * spec.intermediate_size
    parts = min(num_rows, MAX_PARTS_ROWS) * spec.num_heads * (spec.head_dim + 2) * 4 * 2
    return num_rows * per_row * size + parts


def _temporaries(specs: Sequence[ModelSpec], num_rows: int, size: int) -> list[int]:
    """Temporaries of a call of each model. A draft head also holds its target's features of all rows, side by side,
    rows of twice its width, and logits before they go to their ids."""
    found = [activation_bytes(spec, num_rows, size) for spec in specs]
    if specs[-1].reads_target:
        target, head = specs
        per_row = len(target.feature_layers) * target.hidden_size + 4 * head.hidden_size
        found[-1] += num_rows * per_row * size + min(num_rows, MAX_GRAPH_ROWS) * head.vocab_size * 4
    return found


def sampler_bytes(vocab_size: int, num_lanes: int) -> int:
    """Scores of the most rows, and what filters sort, for as many samplers as are at work at once."""
    return num_lanes * vocab_size * (2 * MAX_GRAPH_ROWS * 4 + FILTER_ROWS * FILTER_BYTES)


def _input_bytes(model: ModelEngine, size: int, kv_block_size: int) -> int:
    """Block tables above all, which are as wide as any context needs; and hidden states between segments. What joins
    a head's features reads no tables, and its layer leaves hidden states behind."""
    width = math.ceil(model.spec.max_context / kv_block_size)
    per_row = 4 * width + 64
    num_tables, num_cuts = (1, 2) if model.spec.reads_target else (len(model.segments), len(model.segments) - 1)
    cuts = num_cuts * model.spec.hidden_size * size * sum(ROW_COUNTS)
    return num_tables * sum(MENU) * per_row + cuts


def _graph_nodes(model: ModelEngine) -> int:
    layers = model.spec.num_layers * NODES_PER_LAYER + len(model.spec.feature_layers) * NODES_PER_FEATURE
    return len(MENU) * (layers + NODES_BESIDE_LAYERS * len(model.segments))


def _chain_nodes(drafts: Sequence[ModelSpec], max_num_seqs: int) -> int:
    """Nodes of a draft's steps, with filters and without."""
    num_shapes = 2 * (1 + sum(count < max_num_seqs for count in ROW_COUNTS))
    return sum(num_shapes * (spec.num_layers * NODES_PER_LAYER + 2 * NODES_BESIDE_LAYERS) for spec in drafts)
