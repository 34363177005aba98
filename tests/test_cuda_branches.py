"""Branches for tensors of a GPU, where there is none: shapes, types and arguments of every call, without a number.

FakeTensor runs the real code on device "cuda" up to the operators, which check what they are given; launchers of
kernels check it, too, and are told not to launch. And what the driver's bindings are called with is what they take.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from faser_backend.device.cuda import choice, torch_segment, transfer
from faser_backend.device.cuda.buffers import LogitsBuffer
from faser_backend.device.cuda.call_shapes import RowMenu
from faser_backend.device.cuda.head_runner import JOIN, LAYER
from faser_backend.device.cuda.memory_plan import NODES_BESIDE_LAYERS, NODES_PER_FEATURE, NODES_PER_LAYER
from faser_backend.device.cuda.noise import TorchNoise
from faser_backend.device.cuda.pool import CudaKvPool
from faser_backend.device.cuda.runtime import first_products
from lab.gpu.heads import head_pair
from lab.gpu.nodes import Indexing, call_nodes, draw_nodes
from lab.gpu.pairs import model_pair
from lab.shapes import PAIRS
from plugins import perturb_logits as noise_kernel
from tests.fake_cuda import FakeDriver

CUDA = torch.device("cuda", 0)
VOCAB = 1009  # odd
DRIVER_CALLS = [name for name in vars(FakeDriver) if name.startswith("cu")]


@contextmanager
def faked(launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """launched: (kernel, grid, arguments) of what would be launched."""

    def on_grid(kernel: Any, *grid: int) -> Any:
        return lambda *arguments, **options: launched.append((kernel.__name__, grid, arguments))

    monkeypatch.setattr(noise_kernel, "on_grid", on_grid)
    with FakeTensorMode(allow_non_fake_inputs=True), Indexing():
        yield


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=CUDA)


@pytest.mark.parametrize("has_filters", [False, True])
@pytest.mark.parametrize("num_candidates", [0, 1, 8])
def test_choosing_draft_tokens(monkeypatch: pytest.MonkeyPatch, num_candidates: int, has_filters: bool) -> None:
    launched: list[tuple[Any, ...]] = []
    with faked(launched, monkeypatch):
        words = empty(choice.NUM_WORDS, 5, dtype=torch.int64)
        rows = choice.unpacked(words)
        assert [column.dtype for column in rows] == [torch.int64] * 2 + [torch.float32] * 2 + [
            torch.int64,
            torch.float64,
            torch.float32,
        ]
        assert {(tuple(column.shape), column.device) for column in rows} == {((5,), CUDA)}
        noise = TorchNoise.__new__(TorchNoise)
        noise._log2_size, noise._table = 16, empty(2**16 + VOCAB, dtype=torch.int32)
        filtered = torch.arange(5, device=CUDA) if has_filters else None
        scores = choice.perturbed(empty(5, VOCAB), rows, noise, filtered)
        drawn = choice.draw_draft(scores, rows.inverse_temperature, num_candidates)
        assert (drawn.shape, drawn.dtype, drawn.device) == ((5, 1 + max(num_candidates, 1)), torch.int64, CUDA)
        assert choice.draw(scores).shape == (5, 2)
        children = choice.draw_children(scores, rows.inverse_temperature, max(num_candidates, 1))
        assert (children.shape, children.dtype) == ((5, 1 + 2 * max(num_candidates, 1)), torch.int64)
    ((name, grid, arguments),) = launched
    assert name == "perturb_logits_kernel" and grid == (5, -(-VOCAB // noise_kernel.BLOCK_V))
    assert len(arguments) == 8 and arguments[-1] is scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_head_gives_float32_whatever_its_weights_are(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    with faked([], monkeypatch):
        logits = LogitsBuffer(CUDA).rows(3, VOCAB)
        torch_segment.head_product(empty(3, 16, dtype=dtype), empty(VOCAB, 16, dtype=dtype), logits)
        assert (logits.dtype, tuple(logits.shape), logits.device) == (torch.float32, (3, VOCAB), CUDA)
        bias = torch_segment.product(empty(3, 16, dtype=dtype), empty(8, 16, dtype=dtype), empty(8, dtype=dtype))
        assert bias.shape == (3, 8) and bias.dtype == dtype
        first_products(CUDA, dtype)
        with pytest.raises(RuntimeError):  # the check sees a shape that does not fit
            torch_segment.head_product(empty(3, 16, dtype=dtype), empty(VOCAB, 15, dtype=dtype), logits)


def test_transfers_are_queued_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning and events need a device: they are noted, the copies are real ones of fake tensors."""
    notes: list[str] = []

    class Event:
        def record(self) -> None:
            notes.append("record")

        def synchronize(self) -> None:
            notes.append("wait")

    class Copied:
        """What a pinned copy is asked for."""

        def __init__(self, shape: Any, dtype: Any, pin_memory: bool) -> None:
            assert pin_memory
            self.shape, self.dtype = shape, dtype

        def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
            assert non_blocking and source.shape == self.shape and source.dtype == self.dtype
            notes.append("copy")

        def numpy(self) -> np.ndarray:
            return np.zeros(tuple(self.shape))

    with faked([], monkeypatch):
        tensors = [empty(3, 2), empty(4, dtype=torch.int64)]
        assert all(isinstance(tensor, FakeTensor) for tensor in tensors)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch, "empty", Copied)
        results = transfer.to_host(*tensors)
    assert [result.shape for result in results] == [(3, 2), (4,)]
    assert notes == ["copy", "copy", "record", "wait"], "one wait for all"


def test_graphs_have_no_more_nodes_than_memory_is_planned_for() -> None:
    """Of a whole draft model's step and of a target cut at an exit: every launch of them, by kernel and operator."""
    pair = PAIRS["qwen3-8b/0.6b"]
    models = model_pair(pair, "bf16")
    assert models.draft is not None
    menu = RowMenu(64)
    draft = call_nodes(models.draft, 0, menu.of_decode(8, 1))
    assert draft["pruned_chunk_attention_kernel"] == draft["gated_silu_kernel"] == 28
    assert draft["mm"] == 4 * 28 + 1 and draft["add_rms_norm_kernel"] == 2 * 28 + 1
    for model, nodes in (
        (models.draft, [draft]),
        (models.target, [call_nodes(models.target, index, menu.of_decode(40, 1)) for index in range(2)]),
    ):
        count = sum(sum(each.values()) for each in nodes)
        assert count <= model.spec.num_layers * NODES_PER_LAYER + len(nodes) * NODES_BESIDE_LAYERS
        assert all(name in each for each in nodes for name in ("rotate_heads_kernel", "mm"))
    assert sum(draw_nodes(VOCAB, 8, 0, has_filters=False).values()) <= NODES_BESIDE_LAYERS


def test_calls_of_a_head_and_of_what_it_reads_fit_together() -> None:
    """Both segments of a head, as chains and trees, with logits and as a prompt's chunk; the target keeps three layers'
    inputs, in a graph with three nodes more for each."""
    pair = PAIRS["qwen3-8b/0.6b"]
    models, plain = head_pair(pair, "bf16"), model_pair(pair, "bf16")
    assert models.draft is not None
    menu = RowMenu(64)
    decode, prompt = menu.of_decode(8, 1), menu.menu(0)[-1]
    assert prompt.num_logit_rows == 0
    joined = call_nodes(models.draft, JOIN, decode._replace(num_logit_rows=0))
    assert joined == {"remainder": 1, "_to_copy": 1, "index_select": 1, "mm": 1}
    layer = call_nodes(models.draft, LAYER, decode)
    assert layer == call_nodes(models.draft, LAYER, decode._replace(has_trees=True))
    assert layer["add_rms_norm_kernel"] == 4 and layer["mm"] == 5 and layer["index_copy_"] == layer["fill_"] == 1
    assert sum(layer.values()) + sum(joined.values()) <= NODES_PER_LAYER + 2 * NODES_BESIDE_LAYERS
    chunk = call_nodes(models.draft, LAYER, prompt)
    assert chunk["write_kv_kernel"] == chunk["mm"] == 1 and not chunk["pruned_chunk_attention_kernel"]
    for bounds in (decode, prompt):
        nodes = [
            sum((call_nodes(each.target, index, bounds) for index in range(2)), Counter()) for each in (models, plain)
        ]
        more = nodes[0] - nodes[1]
        assert more == {"remainder": 3, "_to_copy": 3, "index_copy_": 3}
        assert sum(more.values()) == 3 * NODES_PER_FEATURE


def test_a_call_of_trees_is_the_call_of_chains_with_a_mask() -> None:
    """As many nodes; every attention gets the mask, and the launcher takes its shapes and types."""
    models = model_pair(PAIRS["qwen3-8b/0.6b"], "bf16")
    assert models.draft is not None
    masks: list[tuple[Any, ...]] = []

    def on_launch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if kernel.__name__ == "pruned_chunk_attention_kernel":
            masks.append(arguments[10:12])

    chains, trees = (RowMenu(64).menu(0, has_trees=True)[index] for index in (4, -11))
    assert trees == chains._replace(has_trees=True)
    nodes = [call_nodes(models.draft, 0, bounds, on_launch=on_launch) for bounds in (chains, trees)]
    assert nodes[0] == nodes[1]
    assert masks[:28] == [(None, None)] * 28
    for trunk_lens, ancestors in masks[28:]:
        assert (tuple(trunk_lens.shape), trunk_lens.dtype) == ((16,), torch.int32)
        assert (tuple(ancestors.shape), ancestors.dtype) == ((16,), torch.int64)


@pytest.mark.parametrize("num_features", [0, 3])
def test_cells_move_within_the_pools_of_a_device(monkeypatch: pytest.MonkeyPatch, num_features: int) -> None:
    pool = CudaKvPool.__new__(CudaKvPool)
    with faked([], monkeypatch):
        pool.storage = empty(2, 2, 3, 9, 16, 32, dtype=torch.bfloat16)
        pool.features = empty(9, 16, num_features, 64, dtype=torch.bfloat16)
        pool.move(empty(5, dtype=torch.int64), empty(5, dtype=torch.int64))
        with pytest.raises(RuntimeError):
            pool.move(empty(5, dtype=torch.int64), empty(4, dtype=torch.int64))


class TestBindings:
    """Arguments of cuda.bindings' functions, by their own docstrings; the fake driver has the same."""

    @pytest.mark.parametrize("name", DRIVER_CALLS)
    def test_take_as_many_arguments_as_the_fake(self, name: str) -> None:
        driver = pytest.importorskip("cuda.bindings.driver")
        first = (inspect.getdoc(getattr(driver, name)) or "").partition("\n")[0]
        found = re.fullmatch(rf"{name}\((.*)\)", first)
        assert found is not None, first
        inside = re.sub(r"\[[^\]]*\]", "", found[1])
        wanted = [part for part in inside.split(",") if part.strip()]
        parameters = list(inspect.signature(getattr(FakeDriver, name)).parameters)[1:]
        assert len(wanted) == len(parameters), f"{first} against {parameters}"

    def test_have_the_enumerations_that_are_passed(self) -> None:
        driver = pytest.importorskip("cuda.bindings.driver")
        assert int(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) == 16
        assert int(driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM) == 1
        assert int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM) == 1
        assert int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING) == 1
