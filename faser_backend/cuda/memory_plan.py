"""Plans a GPU's memory before anything is allocated; KV blocks get what the other uses leave.

The lines are upper bounds from the shapes of calls, except an allowance for CUDA's memory per graph. The plan needs
neither torch nor a device, so `faser doctor` can print it without a GPU.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from faser_backend.core.config import MAX_LORA_RANK, EngineConfig
from faser_backend.core.model import DSPARK, EAGLE3, ModelSpec
from faser_backend.cuda.call_shapes import (
    FILTER_ROWS,
    LARGE_COUNTS,
    MAX_GRAPH_ROWS,
    MAX_PROMPT_ROWS,
    ROW_COUNTS,
    UNLIMITED,
    VERIFY_ROWS,
    menu_shapes,
)
from faser_backend.manifest import ModelEngine
from faser_backend.plugins import attention_config as attention
from faser_backend.plugins.tensorrt_contract import ELEMENT_BYTES

NODES_PER_LAYER = 10  # nodes of a graph; more with biases, split contexts and adapters
NODES_PER_FEATURE = 3  # of a layer whose input a draft head reads
NODES_BESIDE_LAYERS = 24
GRAPH_NODE_BYTES = 16 << 10  # allowance for CUDA's device memory per node
FILTER_BYTES = 60  # per row and token while top-k and top-p sort: scores, copies, indices, sums in float64
SCORE_BYTES = 96  # of a row at an exit: its candidates and their scores
CHAIN_BYTES = 6 << 10  # of a row of a draft loop's graph: the plan and draws of all steps, see draft_loop
MAX_SMS = 160  # of a GPU
MAX_PART_SUMS = 1 << 21  # of a product, see plugins.product
# Rows of every captured call of a segment, without exit scores.
MENU = [shape.num_rows for shape in menu_shapes(UNLIMITED, 0, is_padded=False)]
FRAGMENT_SHARE = 0.04  # of the memory for KV blocks; allocators round up


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The use of a GPU's `free_bytes`: `lines` are reserved, and `kv_bytes` are left for KV pools."""

    free_bytes: int
    block_bytes: int  # of one KV block of both models
    lines: dict[str, int]  # bytes by their use

    @property
    def reserved_bytes(self) -> int:
        return sum(self.lines.values())

    @property
    def kv_bytes(self) -> int:
        """Returns the bytes for KV pools; 0 if the lines exceed the free memory."""
        return max(0, int((self.free_bytes - self.reserved_bytes) * (1 - FRAGMENT_SHARE)))

    @property
    def num_blocks(self) -> int:
        return self.kv_bytes // self.block_bytes

    def report(self, kv_block_size: int) -> list[str]:
        """Returns a line of text per use, in MiB."""
        num_tokens = self.num_blocks * kv_block_size
        left = f"KV blocks: at most {self.num_blocks} of {kv_block_size} tokens, {num_tokens} in all"
        lines = {"free": self.free_bytes, **self.lines, left: self.kv_bytes}
        return [f"{num_bytes / 2**20:8.0f} MiB  {what}" for what, num_bytes in lines.items()]


def plan_memory(
    models: Sequence[ModelEngine],
    config: EngineConfig,
    *,
    dtype: str,
    kv_block_size: int,
    free_bytes: int,
    num_partitions: int,
    unloaded_bytes: int,
    compiled_bytes: int | None = None,
) -> MemoryPlan:
    """Returns the plan of an engine; models: the target, then the draft if there is one.

    dtype: the manifest's. num_partitions: the whole device and each opened split, every one with runners of all models.
    unloaded_bytes: bytes of weights that are not loaded yet. compiled_bytes: the memory that compiled engines compute
    in, on any share; None: that of runtime torch.
    """
    specs = [model.spec for model in models]
    size = ELEMENT_BYTES[dtype]
    vocab = max(spec.vocab_size for spec in specs)
    num_menus = num_partitions * (1 + bool(config.adapters))  # calls with adapters are captured apart
    inputs = sum(_input_bytes(model, size, kv_block_size) for model in models) * num_menus
    nodes = sum(_graph_nodes(model) for model in models) * num_menus
    rows = max(MAX_GRAPH_ROWS, config.max_num_seqs)  # with logits; more than a graph's are not in its buffer
    scores = _score_bytes(rows, vocab)
    if draft := next((spec for spec in specs[1:] if not spec.block_size), None):
        counts = ROW_COUNTS[: bisect_left(ROW_COUNTS, config.max_num_seqs) + 1]
        num_kinds = 2 * (1 + any(segment.has_exit_scores for segment in models[0].segments))  # filters, candidates
        per_row = _row_bytes(draft, kv_block_size) + num_kinds * CHAIN_BYTES
        num_nodes = draft.num_layers * NODES_PER_LAYER + 2 * NODES_BESIDE_LAYERS
        # Each partition has a draft loop.
        inputs += sum(counts) * per_row * num_partitions
        nodes += len(counts) * num_kinds * num_nodes * num_partitions
        scores += _score_bytes(counts[-1], vocab) * num_partitions
    largest = max(MAX_PROMPT_ROWS, config.max_prefill_tokens)
    activations = sum(_temporaries(specs, MAX_PROMPT_ROWS, size)) * num_partitions
    chunks = max(_temporaries(specs, largest, size))
    files = (file for directory in config.adapters.values() for file in directory.glob("*.safetensors"))
    adapters = config.lora_cache_bytes + sum(file.stat().st_size for file in files)  # as halves, or wider
    if config.adapters:
        adapters += 3 * largest * MAX_LORA_RANK * 4  # of q, k and v at once, see plugins.add_adapters
    if compiled_bytes is not None:
        activations, chunks, adapters = compiled_bytes, 0, 0
    rotations = 0 if compiled_bytes is not None else sum(spec.max_context * spec.head_dim * 4 for spec in specs)
    noise = 4 * (max(1 << 20, 16 * vocab) + vocab)  # at most, see cpu.noise
    lines = {
        "weights": unloaded_bytes,
        "tables of rotations and noise": rotations + noise,
        "logits": sum((rows + MAX_GRAPH_ROWS * (rows > MAX_GRAPH_ROWS)) * spec.vocab_size * 4 for spec in specs),
        "inputs of captured calls": inputs,
        "temporaries of captured calls": activations,
        "temporaries of calls without graphs": chunks,
        "adapters": adapters,
        "scores, and top-k and top-p of some rows at once": scores,
        "graphs (allowance)": nodes * GRAPH_NODE_BYTES,
    }
    return MemoryPlan(free_bytes, sum(block_bytes(spec, kv_block_size, size) for spec in specs), lines)


def block_bytes(spec: ModelSpec, kv_block_size: int, size: int) -> int:
    """Returns the bytes of one KV block of a model: keys, values and features of all layers."""
    kv = spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim
    return kv_block_size * (kv + len(spec.feature_layers) * spec.hidden_size) * size


def activation_bytes(spec: ModelSpec, num_rows: int, size: int) -> int:
    """Returns the bytes of one layer's temporaries and output, the most that a call has alive at once."""
    qk_size = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    per_row = 7 * spec.hidden_size + 3 * (qk_size + spec.intermediate_size)
    tile = attention.launch_config(size, spec.head_dim, spec.num_heads // spec.num_kv_heads, VERIFY_ROWS)
    most_pairs = tile.block_m * attention.PROGRAMS_PER_SM * MAX_SMS // attention.LEAST_SPLIT
    num_parts = min(attention.count_parts(spec.max_context), attention.MAX_SPLITS)
    parts = min(num_rows * spec.num_heads, most_pairs) * num_parts * (spec.head_dim + 2)
    return num_rows * per_row * size + 4 * (parts + MAX_PART_SUMS)


def _temporaries(specs: Sequence[ModelSpec], num_rows: int, size: int) -> list[int]:
    """Returns the bytes of temporaries of a call of each model.

    A draft that reads its target also has the features of all rows, and rows of twice its width. A head has logits by
    its own vocabulary.
    """
    found = [activation_bytes(spec, num_rows, size) for spec in specs]
    if specs[-1].reads_target:
        target, head = specs
        per_row = len(target.feature_layers) * target.hidden_size + 4 * head.hidden_size
        found[-1] += num_rows * per_row * size
        found[-1] += 0 if head.block_size else min(num_rows, MAX_GRAPH_ROWS) * head.vocab_size * 4
    return found


def _score_bytes(num_rows: int, vocab_size: int) -> int:
    """Returns the bytes that sampling computes in: scores, and sorts of filters."""
    return vocab_size * (2 * num_rows * 4 + min(num_rows, FILTER_ROWS) * FILTER_BYTES)


def _row_bytes(spec: ModelSpec, kv_block_size: int) -> int:
    """Returns the bytes of a row's inputs, with a block table for the longest context."""
    return 4 * math.ceil(spec.max_context / kv_block_size) + 64


def _input_bytes(model: ModelEngine, size: int, kv_block_size: int) -> int:
    """Returns the bytes of captured calls' inputs, of hidden states between segments, and of exits' scores.

    A draft's segment that reads features reads no tables. A head's layer and DSpark's block also output hidden states.
    """
    per_row, logit_rows = _row_bytes(model.spec, kv_block_size), sum(ROW_COUNTS)
    all_rows = logit_rows + sum(LARGE_COUNTS)
    num_tables, cut_rows = len(model.segments), (len(model.segments) - 1) * all_rows
    if model.spec.reads_target:
        num_tables, cut_rows = 1, {EAGLE3: all_rows + logit_rows, DSPARK: logit_rows}.get(model.spec.family, 0)
    scored = sum(segment.has_exit_scores for segment in model.segments) * logit_rows * (per_row + SCORE_BYTES)
    return num_tables * sum(MENU) * per_row + cut_rows * model.spec.hidden_size * size + scored


def _graph_nodes(model: ModelEngine) -> int:
    layers = model.spec.num_layers * NODES_PER_LAYER + len(model.spec.feature_layers) * NODES_PER_FEATURE
    scored = sum(
        (segment.last_layer - segment.first_layer) * NODES_PER_LAYER + NODES_BESIDE_LAYERS
        for segment in model.segments
        if segment.has_exit_scores
    )
    return len(MENU) * (layers + NODES_BESIDE_LAYERS * len(model.segments)) + len(ROW_COUNTS) * scored
