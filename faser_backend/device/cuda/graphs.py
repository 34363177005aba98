"""CUDA graphs: launches that are captured once and replayed, and what bounds the number of calls that are kept.

A captured graph keeps the SMs of the stream that it was captured on, whatever stream it is replayed on: so
graphs belong to a runner, which is one share of the device. Knows nothing of models.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from faser_backend.core.errors import FaserError
from faser_backend.device.cuda.segment import Launch

MAX_CALLS = 512  # of one segment; loads whose lengths vary have some hundreds, and to capture again is dear

# A device that has a stream under capture may not be waited for as a whole, and another capture's first
# allocations can do that: one capture at a time.
_CAPTURING = threading.Lock()


class GraphCapturer:
    """Captures launches into graphs whose temporary tensors share one memory pool: they are never replayed at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side_stream = torch.cuda.Stream()

    def capture(self, launch: Launch, what: str) -> Launch:
        """The replay of `launch`, which has run before on the current stream: kernels are loaded then.

        Captures on the current stream, or on one beside it where that is the default stream, which cannot be
        captured and belongs to the whole device. Raises FaserError that names `what`.
        """
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            stream = self._side_stream
        try:
            with _CAPTURING, torch.cuda.stream(stream):
                # thread_local: the other lane may allocate memory at any time, which is no business of this capture.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    launch()
                finally:  # also where launching failed: else the stream stays unusable
                    graph.capture_end()
        except RuntimeError as error:
            raise FaserError(f"{what}: cannot be captured as a CUDA graph ({error.__context__ or error})") from error
        return graph.replay


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
    """The most recently used calls of one segment, or chains of a draft loop."""

    def __init__(self, make: Callable[[Shape], Call], *, is_cuda: bool, max_calls: int = MAX_CALLS) -> None:
        self._make = make
        self._is_cuda = is_cuda
        self._max_calls = max_calls
        self._calls: OrderedDict[Shape, Call] = OrderedDict()

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, shape: Shape) -> Call:
        call = self._calls.get(shape)
        if call is not None:
            self._calls.move_to_end(shape)
            return call
        if len(self._calls) >= self._max_calls:
            if self._is_cuda:  # its last replay may still run, from tensors that go with it
                torch.cuda.current_stream().synchronize()
            self._calls.popitem(last=False)
        call = self._calls[shape] = self._make(shape)
        return call

    def clear(self) -> None:
        self._calls.clear()
