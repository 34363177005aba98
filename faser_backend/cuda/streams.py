"""Shares of a GPU as streams of green contexts; without these draft and target take turns on one stream.

Binding a thread to a share makes the share's stream the thread's current one, on which torch, the project's kernels and
TensorRT queue their work. Streams of torch's pool are never destroyed; those of green contexts belong to the menu.
torch.cuda and the driver are parameters, so all of it can be tested without a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

from faser_backend.core.ports import Proposed, Verified
from faser_backend.cuda.green_contexts import DriverError, GreenShare, GreenSplits
from faser_backend.device.partition import PartitionMenu, Result, ThreadLanes, split_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class SmPartition:
    """SMs of a GPU, and a stream that computes on them."""

    name: str
    size: int  # SMs
    stream: Any  # torch.cuda.Stream
    cuda: Any = field(repr=False)  # torch.cuda

    def bind_current_thread(self) -> None:
        if self.cuda.current_stream() != self.stream:
            self.cuda.set_device(self.stream.device_index)  # also sets the context of direct driver calls
            self.cuda.set_stream(self.stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Redirects the calling thread's work to this share, ordered after its earlier and before its later work."""
        caller = self.cuda.current_stream()
        if caller == self.stream:
            yield
            return
        self.stream.wait_stream(caller)
        self.cuda.set_stream(self.stream)
        try:
            yield
        finally:
            self.cuda.set_stream(caller)
            caller.wait_stream(self.stream)


Method = TypeVar("Method", bound=Callable[..., Any])


def on_share(method: Method) -> Method:
    """Makes a method queue its work on its object's share, on any thread, through the object's `on_share`.

    A serial step may use a split's runner from the stepping thread, and a graph keeps the SMs of its capture's stream.
    """

    @wraps(method)
    def run(self: Any, *arguments: Any) -> Any:
        with self.on_share():
            return method(self, *arguments)

    return cast("Method", run)


@dataclass(frozen=True, slots=True)
class SmMenu:
    """The shares of one GPU. `close` destroys green contexts; no work may run on them."""

    menu: PartitionMenu[SmPartition]
    close: Callable[[], None] = lambda: None


def open_menu(cuda: Any, device_index: int, load_driver: Callable[[], Any]) -> SmMenu:
    """Opens the shares of a GPU: none but the whole where it has no green contexts. The menu's note is logged.

    cuda: torch.cuda, initialised. load_driver: imports cuda.bindings.driver. The whole device has a separate
    stream, because the default stream synchronises with others.
    """
    num_sms = cuda.get_device_properties(device_index).multi_processor_count
    whole = SmPartition("whole", num_sms, cuda.Stream(device_index), cuda)
    try:
        opened = _green_menu(whole, GreenSplits(load_driver(), device_index), device_index)
    except (DriverError, ImportError) as error:
        note = f"{num_sms} SMs: draft and target run in turn, for want of green contexts ({error})"
        opened = SmMenu(PartitionMenu(whole, (), note))
    _log.log(logging.INFO if opened.menu.splits else logging.WARNING, "GPU partitions: %s", opened.menu.note)
    return opened


def _green_menu(whole: SmPartition, green: GreenSplits, device_index: int) -> SmMenu:
    cuda = whole.cuda

    def share(name: str, opened: GreenShare) -> SmPartition:
        stream = cuda.ExternalStream(opened.stream, device=device_index)
        return SmPartition(name, opened.num_sms, stream, cuda)

    splits = tuple((share("draft", draft), share("target", target)) for draft, target in green.splits)
    names = ", ".join(split_name(*split) for split in splits)
    reason = f"{green.num_sms} SMs in groups of {green.group_sms}" + (f"; {green.note}" if green.note else "")
    note = f"{whole.size} SMs: in turn on all, or green contexts {names} ({reason})"
    return SmMenu(PartitionMenu(whole, splits, note), green.close)


class StreamLanes:
    """Two threads, each queueing on the stream of its share of one GPU; implements core.ports.Lanes.

    A run of both lanes is a fork and a join of streams, for which the host never waits. Work that the calling thread
    queued before (prompts, sampling parameters, rows and logits of a serial step) is ordered before all work of both
    lanes, and that before what the calling thread queues afterwards. Between fork and join a lane uses only its own
    model's pool; the stepping thread queues all other work on the stream of the whole device. So any two uses of a
    pool, and of memory that torch reuses, are ordered, whatever their partitions.
    """

    def __init__(self, draft: SmPartition, target: SmPartition) -> None:
        self._cuda = target.cuda
        self._threads = ThreadLanes(draft, target)
        # Events are reused: a wait refers to the recording before it was queued, not to later ones.
        self._forked, self._verified, self._proposed = (self._cuda.Event() for _ in range(3))

    def on_draft(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the draft's thread and stream, between a fork and a join; waits for the thread only."""
        return self._alone(self._threads.on_draft, work, self._proposed)

    def on_target(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the target's thread and stream, as on_draft does."""
        return self._alone(self._threads.on_target, work, self._verified)

    def run_both(self, verify: Callable[[], Verified], propose: Callable[[], Proposed]) -> tuple[Verified, Proposed]:
        """See core.ports.Lanes. The calling thread's next work on the device may read the results."""
        caller = self._fork()
        try:
            return self._threads.run_both(self._between(verify, self._verified), self._between(propose, self._proposed))
        finally:  # even if a phase failed: work that it queued may still run
            caller.wait_event(self._verified)
            caller.wait_event(self._proposed)

    def close(self) -> None:
        """Waits for both threads, not for the device. May be called again."""
        self._threads.close()

    def _alone(self, on_thread: Callable[..., Result], work: Callable[[], Result], ended: Any) -> Result:
        caller = self._fork()
        try:
            return on_thread(self._between(work, ended))
        finally:
            caller.wait_event(ended)

    def _fork(self) -> Any:
        caller = self._cuda.current_stream()
        self._forked.record(caller)
        return caller

    def _between(self, work: Callable[[], Result], ended: Any) -> Callable[[], Result]:
        """Wraps `work` for a lane: it waits for the fork, and `ended` is recorded after it, even if it raises."""

        def run() -> Result:
            stream = self._cuda.current_stream()
            stream.wait_event(self._forked)
            try:
                return work()
            finally:
                ended.record(stream)

        return run
