"""How many nodes the graphs of a pair have, and what a step moves between host and device; no GPU is needed.

The real programs run on fake tensors of device "cuda": operators that compute are counted, and launches of our kernels,
none of which runs. An operator is counted once, though `sort` and reductions may take several kernels.

    python -m lab.gpu.nodes
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from faser_backend.device.cuda import choice
from faser_backend.device.cuda.buffers import InputBlock
from faser_backend.device.cuda.call_shapes import RowMenu
from faser_backend.device.cuda.draft_loop import MAX_STEPS, PLAN_HEIGHT
from faser_backend.device.cuda.head_runner import JOIN
from faser_backend.device.cuda.noise import TorchNoise
from faser_backend.device.cuda.segment import CallBounds, SegmentProgram
from faser_backend.device.cuda.tensors import FEATURES, filled_inputs
from faser_backend.device.cuda.torch_head import TorchHeadLayer, TorchJoin
from faser_backend.device.cuda.torch_segment import TorchSegment
from faser_backend.device.cuda.torch_weights import HeadTensors, LayerTensors, ModelTensors
from faser_backend.manifest import ModelEngine
from lab.gpu.pairs import KV_BLOCK_SIZE, model_pair
from lab.shapes import PAIRS, find_pair
from lab.tables import markdown_table
from plugins import add_rms_norm, exit_scores, gated_silu, kv_write, perturb_logits, rotate_heads, split_combine
from plugins import pruned_chunk_attention as attention

CUDA = torch.device("cuda", 0)
KERNEL_MODULES = (
    add_rms_norm, attention, exit_scores, gated_silu, kv_write, perturb_logits, rotate_heads, split_combine,
)  # fmt: skip
NO_NODE = {
    "empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view", "alias", "device", "lift_fresh",
    "view",
}  # fmt: skip
CONTEXT_BLOCKS = 64  # of each sequence, where bytes are counted: 1,024 tokens
DTYPE = torch.bfloat16
NUM_SMS = 132


class Indexing(TorchFunctionMode):
    """Basic indexing by operators: Python's own asks for a guard of the device, which a build for CPUs has not."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and args[0].is_cuda:
            return _indexed(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        return function(*args, **(kwargs or {}))


def _indexed(tensor: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
    dimension = 0
    for each in index:
        if each is None:
            tensor = tensor.unsqueeze(dimension)
        elif isinstance(each, slice):
            tensor = torch.ops.aten.slice(tensor, dimension, each.start, each.stop, each.step or 1)
        else:
            tensor = tensor.select(dimension, each)
            continue
        dimension += 1
    return tensor


class _Operators(TorchDispatchMode):
    """Counts operators that compute, by name."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not function.is_view and name not in NO_NODE:
            self._found[name] += 1
        return function(*args, **(kwargs or {}))


OnLaunch = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


@contextmanager
def counted(
    on_launch: OnLaunch = lambda kernel, arguments, options: None, capability: int = 90
) -> Iterator[Counter[str]]:
    """Operators and kernels of what runs meanwhile, by name. on_launch: given each kernel and what it is launched with.
    capability: of the GPU that launchers see."""
    found: Counter[str] = Counter()

    def on_grid(kernel: Any, *grid: int) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            found.update([kernel.__name__])
            on_launch(kernel, arguments, options)

        return launch

    with mock.patch.multiple(torch.cuda, get_device_capability=lambda device: divmod(capability, 10)):
        patches = [mock.patch.object(module, "on_grid", on_grid) for module in KERNEL_MODULES]
        for patch in patches:
            patch.start()
        try:
            with Indexing(), _Operators(found):
                yield found
        finally:
            for patch in patches:
                patch.stop()


def call_nodes(model: ModelEngine, index: int, bounds: CallBounds, **watching: Any) -> Counter[str]:
    """Nodes of the graph of one segment's call, on 132 SMs. watching: of `counted`."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = _tensors(model, index, bounds)
        launch = _program(model, index).prepare(tensors, bounds)
        with counted(**watching) as found:
            launch()
    return found


def draw_nodes(
    vocab_size: int, num_sequences: int, num_candidates: int, *, has_filters: bool, **watching: Any
) -> Counter[str]:
    """Nodes of the draw of a draft token, and of what feeds it to the next step."""
    with FakeTensorMode(allow_non_fake_inputs=True), Indexing():
        noise = TorchNoise.__new__(TorchNoise)
        noise._log2_size, noise._table = 16, _empty(2**16 + vocab_size, dtype=torch.int32)
        plan, drawn = (
            _empty(PLAN_HEIGHT, num_sequences, dtype=torch.int64),
            _empty(MAX_STEPS, num_sequences, 1 + max(num_candidates, 1), dtype=torch.int64),
        )
        logits = _empty(num_sequences, vocab_size)
        filtered = torch.arange(num_sequences, device=CUDA) if has_filters else None
        step = plan[-1, :1]
        with counted(**watching) as found:
            drawn.index_select(0, step)
            plan[choice.NUM_WORDS : -1].view(MAX_STEPS, 2, -1).index_select(0, step)
            step.add_(1)
            rows = choice.unpacked(plan[: choice.NUM_WORDS])
            rows = rows._replace(positions=rows.positions + step)
            scores = choice.perturbed(logits, rows, noise, filtered)
            drawn.index_copy_(0, step, choice.draw_draft(scores, rows.inverse_temperature, num_candidates)[None])
    found["copy_"] += 4  # token, position, length and slot, each to its input
    return found


def moved_bytes(model: ModelEngine, num_sequences: int, num_rows: int) -> dict[str, int]:
    """Bytes of a verification of num_rows rows, and of a chain of num_rows / num_sequences - 1 draft tokens."""
    bounds = RowMenu(-(-model.spec.max_context // KV_BLOCK_SIZE)).of_decode(num_rows, 1)
    with FakeTensorMode(), Indexing():
        block = InputBlock(filled_inputs(model.segments[-1], packs_tables=True), bounds, CUDA)
        to_device = block.num_bytes(num_sequences, CONTEXT_BLOCKS)
    length = num_rows // num_sequences - 1
    size = RowMenu(1).of_decode(num_sequences, 1).num_rows
    return {
        "verification to the device": to_device * len(model.segments),
        "verification to the host": 2 * 8 * num_rows,
        "chain to the device": 8 * PLAN_HEIGHT * size + to_device,
        "chain to the host": 2 * 8 * length * size,
    }


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=CUDA)


def _program(model: ModelEngine, index: int) -> SegmentProgram:
    spec, segment, weights = model.spec, model.segments[index], _weights(model)
    if not spec.reads_target:
        return TorchSegment(spec, segment, weights, NUM_SMS)
    features = next(tensor for tensor in model.segments[JOIN].inputs if tensor.name == FEATURES)
    join = _empty(spec.hidden_size, math.prod(map(int, features.shape[2:])), dtype=DTYPE)
    layer = replace(weights.layers[0], qkv=_empty(weights.layers[0].qkv.shape[0], 2 * spec.hidden_size, dtype=DTYPE))
    known = spec.vocab_size // 2
    weights = replace(weights, layers=(layer,), head=_empty(known, spec.hidden_size, dtype=DTYPE))
    head = HeadTensors(weights, _empty(spec.hidden_size), join, _empty(known, dtype=torch.int64))
    return TorchJoin(segment, head) if index == JOIN else TorchHeadLayer(spec, segment, head, NUM_SMS)


def _weights(model: ModelEngine) -> ModelTensors:
    spec = model.spec
    kv, heads = spec.num_kv_heads * spec.head_dim, spec.num_heads * spec.head_dim
    norm, head_norm = _empty(spec.hidden_size), _empty(spec.head_dim) if spec.has_qk_norm else None
    layer = LayerTensors(
        norm,
        _empty(heads + 2 * kv, spec.hidden_size, dtype=DTYPE),
        _empty(spec.hidden_size, heads, dtype=DTYPE),
        norm,
        _empty(2 * spec.intermediate_size, spec.hidden_size, dtype=DTYPE),
        _empty(spec.hidden_size, spec.intermediate_size, dtype=DTYPE),
        q_norm=head_norm,
        k_norm=head_norm,
    )
    embedding = _empty(spec.vocab_size, spec.hidden_size, dtype=DTYPE)
    table = _empty(spec.max_context, spec.head_dim // 2)
    return ModelTensors(embedding, (layer,) * spec.num_layers, norm, embedding, table, table)


def _tensors(model: ModelEngine, index: int, bounds: CallBounds) -> dict[str, torch.Tensor]:
    spec, segment = model.spec, model.segments[index]
    is_join = spec.reads_target and index == JOIN
    with Indexing():
        filled = filled_inputs(segment, packs_tables=not is_join, has_trees=bounds.has_trees)
        tensors = dict(InputBlock(filled, bounds, CUDA).tensors)
    for layer in range(segment.first_layer, segment.last_layer):
        for name in (f"k_pool.{layer}", f"v_pool.{layer}"):
            tensors[name] = _empty(spec.num_kv_heads, 64, KV_BLOCK_SIZE, spec.head_dim, dtype=DTYPE)
    tensors["hidden"] = tensors["hidden_out"] = _empty(bounds.num_rows, spec.hidden_size, dtype=DTYPE)
    for tensor in segment.inputs:
        if tensor.name == FEATURES:
            tensors[FEATURES] = _empty(64, KV_BLOCK_SIZE, *map(int, tensor.shape[2:]), dtype=DTYPE)
    tensors["logits"] = _empty(bounds.num_logit_rows, spec.vocab_size)
    tensors["exit_scores"] = _empty(bounds.num_rows, bounds.num_candidates)
    return tensors


def rows_of(name: str) -> list[dict[str, Any]]:
    """Per pair: nodes per draft token, with filters and without, and per verification of 8 sequences of 5 rows."""
    pair = find_pair(name)
    models = model_pair(pair, "bf16")
    assert models.draft is not None
    draft_shape, verify_shape = RowMenu(64).of_decode(8, 1), RowMenu(64).of_decode(40, 1)
    step = sum(call_nodes(models.draft, 0, draft_shape).values())
    plain, filtered = (
        sum(draw_nodes(pair.draft.vocab_size, 8, 0, has_filters=each).values()) for each in (False, True)
    )
    verify = [sum(call_nodes(models.target, index, verify_shape).values()) for index in range(2)]
    return [
        {
            "pair": name,
            "draft call": step,
            "draw": plain,
            "draw, filters": filtered,
            "per draft token": step + plain,
            "verification": sum(verify),
            **moved_bytes(models.target, 8, 40),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows = [row for name in PAIRS for row in rows_of(name)]
    print("\n".join(markdown_table(list(rows[0]), rows)))


if __name__ == "__main__":
    main()
