"""A fake of what PyTorch does around graph captures, with its rules, for code that runs on torch's CPU device.

- A capture that fails leaves the allocator in the graph's pool, until that is ended; a pool that is being
  allocated into takes no other capture.
- A capturing thread may not wait for the device; trying loses the capture.
Breaches that a GPU would answer with wrong numbers, not with an error, are in `broken`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from faser_backend.core.ports import GraphCounts
from faser_backend.cuda.graphs import GraphCapturer
from faser_backend.cuda.segment import Launch
from tests.support.fake_cuda import FakeCuda, FakeStream


class CaptureMachine(FakeCuda):
    """The parts of torch.cuda that shares and captures use. `product` is a matrix product on the calling thread."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: list[str] = []
        self.left_open: set[Any] = set()  # pools of captures that failed
        self.guard = threading.RLock()
        self._pools = count(1)
        self.thread = threading.local()
        machine = self

        class CUDAGraph:
            is_lost = False

            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                with machine.guard:
                    if pool in machine.left_open:
                        raise RuntimeError(f"pool {pool} is being recorded to already")
                    self.pool = pool
                    assert machine.current_stream().cuda_stream, "the default stream cannot be captured"
                    machine.thread.capturing = self

            def capture_end(self) -> None:
                with machine.guard:
                    machine.thread.capturing = None
                    if self.is_lost:
                        machine.left_open.add(self.pool)
                        raise RuntimeError("operation failed due to a previous error during capture")

            def replay(self) -> None:
                pass

        self.CUDAGraph = CUDAGraph

    def default_stream(self) -> FakeStream:
        return self._default

    def graph_pool_handle(self) -> int:
        return next(self._pools)

    def end_allocations(self, pool: Any) -> None:
        if pool not in self.left_open:
            raise RuntimeError(f"pool {pool} is not being recorded to")
        self.left_open.remove(pool)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        caller = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(caller)

    def product(self) -> None:
        """Takes memory, unless a graph replays it."""
        with self.guard:
            if self.left_open and self._capturing() is None and not getattr(self.thread, "is_replaying", False):
                self.broken.append("memory was taken from the pool of a failed capture")

    def wait(self) -> None:
        """Waits for the device on the host."""
        graph = self._capturing()
        if graph is not None:
            graph.is_lost = True
            raise RuntimeError("operation not permitted when stream is capturing")

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Counts calls within the block as a graph's."""
        self.thread.is_replaying = True
        try:
            yield
        finally:
            self.thread.is_replaying = False

    def _capturing(self) -> Any:
        return getattr(self.thread, "capturing", None)


class MachineCapturer(GraphCapturer):
    """A GraphCapturer on the machine; replays compute, too."""

    def __init__(self, machine: CaptureMachine, counts: GraphCounts) -> None:
        super().__init__(counts, machine, machine.end_allocations)

    def capture(self, launch: Launch, what: str) -> Launch:
        replay = super().capture(launch, what)
        if replay is launch:
            return launch

        def run() -> None:
            replay()
            with self.cuda.replaying():
                launch()

        return run


def watch(monkeypatch: Any, machine: CaptureMachine) -> None:
    """Redirects products and waits of the real code to the machine."""
    from faser_backend.cuda import draft_loop, sampler, torch_programs

    def before(module: Any, name: str, notice: Callable[[], None]) -> None:
        inner = getattr(module, name)

        def noticed(*arguments: Any, **options: Any) -> Any:
            notice()
            return inner(*arguments, **options)

        monkeypatch.setattr(module, name, noticed)

    before(torch_programs.MatrixProduct, "__call__", machine.product)
    for module in (draft_loop, sampler):
        before(module, "to_host", machine.wait)
