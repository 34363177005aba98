"""Branches for GPU tensors without a GPU: shapes, types and arguments of every call, without numbers.

FakeTensor runs the real code on device "cuda" up to the operators, which check their arguments; so do launchers of
kernels, which then do not launch. Arguments of the driver's bindings are checked too.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from faser_backend.cuda import buffers, sampler
from faser_backend.cuda.sampler import TorchNoise
from faser_backend.plugins import perturb_logits as noise_kernel
from faser_backend.plugins import product as product_kernel
from tests.support.fake_cuda import FakeDriver

CUDA = torch.device("cuda", 0)
VOCAB = 1009  # odd
DRIVER_CALLS = [name for name in vars(FakeDriver) if name.startswith("cu")]


class Indexing(TorchFunctionMode):
    """Basic indexing by operators: Python's own needs a device guard, which CPU builds lack."""

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


@contextmanager
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Fakes launches; yields a list of each one's (kernel, grid, arguments)."""
    launched: list[tuple[Any, ...]] = []

    def on_grid(kernel: Any, *grid: int) -> Any:
        return lambda *arguments, **options: launched.append((kernel.__name__, grid, arguments))

    for module in (noise_kernel, product_kernel):
        monkeypatch.setattr(module, "on_grid", on_grid)
    monkeypatch.setattr(product_kernel, "compute_capability", lambda _: 90)
    with FakeTensorMode(allow_non_fake_inputs=True), Indexing():
        yield launched


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=CUDA)


@pytest.mark.parametrize("has_filters", [False, True])
@pytest.mark.parametrize("num_candidates", [0, 1, 8])
def test_choosing_draft_tokens(monkeypatch: pytest.MonkeyPatch, num_candidates: int, has_filters: bool) -> None:
    with faked(monkeypatch) as launched:
        rows = sampler.unpacked(empty(sampler.NUM_WORDS, 5, dtype=torch.int64))
        assert [column.dtype for column in rows] == [torch.int64] * 2 + [torch.float32] * 2 + [
            torch.int64,
            torch.float64,
            torch.float32,
        ]
        assert {(tuple(column.shape), column.device) for column in rows} == {((5,), CUDA)}
        noise = TorchNoise.__new__(TorchNoise)
        noise._log2_size, noise._table = 16, empty(2**16 + VOCAB, dtype=torch.int32)
        filtered = torch.arange(5, device=CUDA) if has_filters else None
        scores = sampler.perturbed(empty(5, VOCAB), rows, noise, filtered)
        drawn = sampler.draw_draft(scores, rows.inverse_temperature, num_candidates)
        assert (drawn.shape, drawn.dtype, drawn.device) == ((5, 1 + max(num_candidates, 1)), torch.int64, CUDA)
        assert sampler.draw(scores).shape == (5, 2)
    ((name, grid, arguments),) = launched
    assert name == "perturb_logits_kernel" and grid == (5, -(-VOCAB // noise_kernel.BLOCK_V))
    assert len(arguments) == 8 and arguments[-1] is scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_of_few_rows_have_a_program_for_each_part(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    with faked(monkeypatch) as launched:
        weight, product = empty(130, 2048, dtype=dtype), product_kernel.MatrixProduct(CUDA)
        for num_rows in (3, 300):
            logits = empty(num_rows, 130)
            product(empty(num_rows, 2048, dtype=dtype), weight, weight[:, 0].clone(), logits)
        assert product(empty(3, 16, dtype=dtype), empty(9, 16, dtype=dtype)).dtype == dtype
    grids = (1, 3, 4), ((5, 3, 1) if dtype == torch.float32 else (3, 3, 1)), (1, 1, 1)
    assert [(name, grid) for name, grid, _ in launched] == [("product_kernel", grid) for grid in grids]
    few, *others = (arguments[9] for *_, arguments in launched)
    assert (few.shape, few.dtype, others) == ((4, 3, 130), torch.float32, [None, None])


def test_transfers_are_queued_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning and events need a device: they are recorded; copies are real ones of fake tensors."""
    notes: list[str] = []

    class Event:
        def record(self) -> None:
            notes.append("record")

        def synchronize(self) -> None:
            notes.append("wait")

    class Copied:
        """A pinned copy that checks its arguments."""

        def __init__(self, shape: Any, dtype: Any, pin_memory: bool) -> None:
            assert pin_memory
            self.shape, self.dtype = shape, dtype

        def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
            assert non_blocking and source.shape == self.shape and source.dtype == self.dtype
            notes.append("copy")

        def numpy(self) -> np.ndarray:
            return np.zeros(tuple(self.shape))

    with faked(monkeypatch):
        tensors = [empty(3, 2), empty(4, dtype=torch.int64)]
        assert all(isinstance(tensor, FakeTensor) for tensor in tensors)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch, "empty", Copied)
        results = buffers.to_host(*tensors)
    assert [result.shape for result in results] == [(3, 2), (4,)]
    assert notes == ["copy", "copy", "record", "wait"], "one wait for all"


class TestBindings:
    """Checks arguments of cuda.bindings' functions against their docstrings; the fake driver has the same."""

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
