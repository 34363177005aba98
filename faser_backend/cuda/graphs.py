"""CUDA graphs: launches that are captured once and replayed.

A captured graph keeps the SMs of the stream that it was captured on, whatever stream it is replayed on: so
graphs belong to a runner, which is one share of the device. It also keeps the address of a cuBLAS workspace that
PyTorch frees as soon as any graph of that stream is destroyed: so graphs, also those whose capture failed, live as
long as their runner. Knows nothing of models.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from faser_backend.core.graph_counts import GraphCounts
from faser_backend.cuda.fatal import is_fatal
from faser_backend.cuda.segment import Launch

_log = logging.getLogger(__name__)
MAX_GRAPHS = 64  # of one segment or draft loop; a menu of row counts has far fewer
MAX_EAGER = 64  # calls of further shapes that are kept

# A device that has a stream under capture may not be waited for as a whole, and another capture's first
# allocations can do that: one capture at a time.
_CAPTURING = threading.Lock()


def _leave_pool(pool: Any) -> None:
    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # pyright: ignore[reportAttributeAccessIssue]


class GraphCapturer:
    """Captures launches into graphs whose temporary tensors share one memory pool: they are never replayed at once."""

    def __init__(
        self, counts: GraphCounts, cuda: Any = torch.cuda, leave_pool: Callable[[Any], None] = _leave_pool
    ) -> None:
        """counts: counts every capture. cuda: torch.cuda; leave_pool: what ends allocations into a pool."""
        self.counts = counts
        self._cuda = cuda
        self._leave_pool = leave_pool
        self._pool = cuda.graph_pool_handle()
        self._side_stream: Any = None
        self._failed: list[Any] = []  # graphs that must not be destroyed

    def capture(self, launch: Launch, what: str) -> Launch:
        """The replay of `launch`, which has run before on the current stream: kernels are loaded then.

        Captures on the current stream, or on one beside it where that is the default stream, which cannot be
        captured and belongs to the whole device. Where `launch` cannot be captured the answer is `launch` itself; the
        log says so, naming `what`. Raises only errors after which the device is of no use.
        """
        graph = self._cuda.CUDAGraph()
        stream = self._cuda.current_stream()
        if stream == self._cuda.default_stream():
            self._side_stream = self._side_stream or self._cuda.Stream()
            stream = self._side_stream
        try:
            with _CAPTURING, self._cuda.stream(stream):
                self._capture(graph, launch)
        except Exception as error:
            self._failed.append(graph)
            if is_fatal(error):
                raise
            self.counts.num_failed_captures += 1
            _log.warning(
                "%s: cannot be captured as a CUDA graph and runs without (%s)", what, error.__context__ or error
            )
            return launch
        self.counts.num_graphs += 1
        return graph.replay

    def _capture(self, graph: Any, launch: Launch) -> None:
        # thread_local: the other lane may allocate memory at any time, which is no business of this capture.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:  # also where launching failed: else the stream stays unusable
            try:
                graph.capture_end()
            except Exception:
                # The allocator is still in the pool, where every allocation and the next capture would find it.
                pool, self._pool = self._pool, self._cuda.graph_pool_handle()
                self._leave_pool(pool)
                raise


class RepeatedLaunch:
    """Queues a call: as it is for the first time, which warms it up, and as a captured graph from the second on.

    So a shape that comes once is never captured. Without a capturer, as on a CPU, it always runs as it is.
    """

    def __init__(self, launch: Launch, capturer: GraphCapturer | None, what: str) -> None:
        self._launch = launch
        self._capturer = capturer
        self._what = what
        self._is_warm = False

    def __call__(self) -> None:
        if self._is_warm and self._capturer is not None:
            self._launch = self._capturer.capture(self._launch, self._what)
            self._capturer = None
        self._launch()
        self._is_warm = True


Shape = TypeVar("Shape", bound=Hashable)
Call = TypeVar("Call")


class CallCache(Generic[Shape, Call]):
    """The calls of one segment, or chains of a draft loop, by shape.

    The first max_graphs are captured and stay for good: to destroy one would break the others. Of further shapes the
    most recently used max_eager are kept, without graphs.
    """

    def __init__(
        self,
        make: Callable[[Shape, bool], Call],
        *,
        is_cuda: bool,
        max_graphs: int = MAX_GRAPHS,
        max_eager: int = MAX_EAGER,
    ) -> None:
        """make: a call of a shape, and whether it may be captured."""
        self._make = make
        self._is_cuda = is_cuda
        self._max_graphs = max_graphs
        self._max_eager = max_eager
        self._captured: dict[Shape, Call] = {}
        self._eager: OrderedDict[Shape, Call] = OrderedDict()

    def __len__(self) -> int:
        return len(self._captured) + len(self._eager)

    @property
    def shapes(self) -> list[Shape]:
        return [*self._captured, *self._eager]

    def get(self, shape: Shape) -> Call:
        if (call := self._captured.get(shape)) is not None:
            return call
        if (call := self._eager.get(shape)) is not None:
            self._eager.move_to_end(shape)
            return call
        if len(self._captured) < self._max_graphs:
            call = self._captured[shape] = self._make(shape, True)
            return call
        if not self._eager:
            _log.warning("%s: more than %d shapes: this one and others run without graphs", shape, self._max_graphs)
        if len(self._eager) >= self._max_eager:
            if self._is_cuda:  # its last launch may still run, from tensors that go with it
                torch.cuda.current_stream().synchronize()
            self._eager.popitem(last=False)
        call = self._eager[shape] = self._make(shape, False)
        return call

    def clear(self) -> None:
        self._captured.clear()
        self._eager.clear()
