"""CUDA graphs: launches that are captured once and replayed; and the errors after which a process must be restarted.

A graph keeps the SMs of the stream that it was captured on, so it belongs to a runner, which has one share.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from faser_backend.core.ports import GraphCounts
from faser_backend.cuda.segment import Launch

_log = logging.getLogger(__name__)
MAX_GRAPHS = 96  # per segment or draft loop; menus have fewer shapes

# While a stream is being captured, nothing may synchronise the whole device. The first allocations of another capture
# can do that, so captures run one at a time.
_CAPTURING = threading.Lock()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps garbage from being collected: freeing a tensor or a graph would call the driver and break the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _leave_pool(pool: Any) -> None:
    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(eq=False)
class GraphCapturer:
    """Captures launches into graphs that share one memory pool, because they are never replayed concurrently."""

    counts: GraphCounts  # of every capture
    cuda: Any = torch.cuda
    leave_pool: Callable[[Any], None] = _leave_pool  # ends allocations into a pool

    def __post_init__(self) -> None:
        self._pool = self.cuda.graph_pool_handle()
        self._side_stream: Any = None

    def capture(self, launch: Launch, what: str) -> Launch:
        """Captures `launch` and returns its replay. `launch` must have run on the current stream, to load kernels.

        It captures on the current stream, or on a side stream if that is the default stream, which cannot be captured.
        If the capture fails, it logs a warning with `what` and returns `launch` itself. Raises fatal errors only.
        """
        graph = self.cuda.CUDAGraph()
        stream = self.cuda.current_stream()
        if stream == self.cuda.default_stream():
            self._side_stream = self._side_stream or self.cuda.Stream()
            stream = self._side_stream
        try:
            with _CAPTURING, _no_collection(), self.cuda.stream(stream):
                self._capture(graph, launch)
        except Exception as error:
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
        # thread_local: the other lane may allocate memory at any time without breaking this capture.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:  # even if the launch failed, or the stream stays unusable
            try:
                graph.capture_end()
            except Exception:
                # The allocator still allocates from the pool; every allocation and the next capture would do so.
                pool, self._pool = self._pool, self.cuda.graph_pool_handle()
                self.leave_pool(pool)
                raise


@dataclass(eq=False)
class RepeatedLaunch:
    """Queues a call: eagerly the first time, as a warm-up, and as a captured graph from the second time on.

    A shape that occurs once is never captured. Without a capturer, as on a CPU, every call is eager.
    """

    launch: Launch
    capturer: GraphCapturer | None
    what: str
    captured: Launch | None = None
    is_warm: bool = False

    def __call__(self) -> None:
        if self.is_warm and self.capturer is not None:
            self.captured = self.launch  # keeps the tensors that the graph reads
            self.launch = self.capturer.capture(self.launch, self.what)
            self.capturer = None
        self.launch()
        self.is_warm = True


Shape = TypeVar("Shape", bound=Hashable)
Call = TypeVar("Call")


class CallCache(dict[Shape, Call]):
    """The calls of one segment, or chains of a draft loop, by shape; makes those that are missing.

    The first MAX_GRAPHS are kept until the runner closes: to replace one would capture on live traffic.
    """

    def __init__(self, make: Callable[[Shape, bool], Call]) -> None:
        """make: creates the call of a shape; its second argument tells whether it is kept, and may be captured."""
        self._make = make

    def __missing__(self, shape: Shape) -> Call:
        is_kept = len(self) < MAX_GRAPHS
        call = self._make(shape, is_kept)
        if is_kept:
            self[shape] = call
            if len(self) == MAX_GRAPHS:
                _log.warning("%s: the last of %d shapes: others run without graphs", shape, MAX_GRAPHS)
        return call


# Errors that destroy the CUDA context, which all streams share: cudaError_t of driver_types.h, with the messages of
# cudaGetErrorString. torch passes some numbers on; else the message identifies the error.
FATAL_ERRORS = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected",
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "tensor memory not completely freed",
    999: "unknown error",
}
_UNAMBIGUOUS = tuple(words.lower() for number, words in FATAL_ERRORS.items() if number != 999)


def is_fatal(error: BaseException) -> bool:
    """Tells whether `error`, its cause or its context makes the device unusable."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        message = str(each).lower()
        is_named = "cuda" in message and any(words in message for words in _UNAMBIGUOUS)
        if is_named or getattr(each, "error_code", None) in FATAL_ERRORS:
            return True
        pending += [each.__cause__, each.__context__]
    return False
