"""Shares of a GPU as streams, and the choice of how to make them: green contexts, else priorities, else none.

A share is bound to a thread by making its stream the thread's current one; everything of torch, of our kernels
and of TensorRT is queued there. Streams of torch's own pool are never destroyed; those of green contexts belong
to the menu. torch.cuda and the driver are given, so that the choice can be tested without a GPU.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast

from faser_backend.cuda.green_contexts import DriverError, GreenShare, GreenSplits
from faser_backend.device.lanes import Proposed, Result, ThreadLanes, Verified
from faser_backend.device.partition import PartitionMenu, split_name

_log = logging.getLogger(__name__)


class PartitionChoice(NamedTuple):
    """How draft and target share the device, and why so."""

    kind: Literal["green_contexts", "priority_streams", "serial"]
    reason: str


class FirstWork:
    """Work that a thread runs when it first queues on a stream: libraries open handles per thread and workspaces per
    handle and stream with their first call, and none of that may happen while a graph is captured."""

    def __init__(self, work: Callable[[], None] = lambda: None) -> None:
        self._work = work
        self._done = threading.local()

    def ensure(self, stream: Any) -> None:
        """Runs the work on the current stream, `stream`, unless the calling thread has."""
        done: set[int] = self._done.__dict__.setdefault("streams", set())
        if stream.cuda_stream not in done:
            done.add(stream.cuda_stream)
            self._work()


@dataclass(frozen=True, slots=True, eq=False)
class SmPartition:
    """SMs of a GPU by a stream that computes on them."""

    name: str
    size: int  # SMs
    stream: Any  # torch.cuda.Stream
    cuda: Any = field(repr=False)  # torch.cuda
    first_work: FirstWork = field(repr=False)

    def bind_current_thread(self) -> None:
        if self.cuda.current_stream() != self.stream:
            self.cuda.set_device(self.stream.device_index)  # and with it the context that the driver's own calls use
            self.cuda.set_stream(self.stream)
            self.first_work.ensure(self.stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Queues here what the calling thread queues meanwhile: behind its own earlier work, before its later."""
        caller = self.cuda.current_stream()
        if caller == self.stream:
            yield
            return
        self.stream.wait_stream(caller)
        self.cuda.set_stream(self.stream)
        try:
            self.first_work.ensure(self.stream)
            yield
        finally:
            self.cuda.set_stream(caller)
            caller.wait_stream(self.stream)


Method = TypeVar("Method", bound=Callable[..., Any])


def on_share(method: Method) -> Method:
    """Makes a method queue its work on the share of its object, on any thread: `on_share` of the object enters it.

    A step that has nothing to overlap may use a split's runner from the stepping thread, whose stream is that of the
    whole device. The work, and above all the graphs that it captures, which keep the SMs of their stream, belong on the
    share.
    """

    @wraps(method)
    def run(self: Any, *arguments: Any) -> Any:
        with self.on_share():
            return method(self, *arguments)

    return cast("Method", run)


@dataclass(frozen=True, slots=True)
class SmMenu:
    """The shares of one GPU. `choice` says how they were made. Owns green contexts: `close` it, again and again if need
    be, when nothing is at work on the shares of splits."""

    menu: PartitionMenu[SmPartition]
    choice: PartitionChoice
    close: Callable[[], None] = lambda: None

    @property
    def cuda(self) -> Any:
        """torch.cuda."""
        return self.menu.whole.cuda


def open_menu(
    cuda: Any, device_index: int, load_driver: Callable[[], Any], first_work: Callable[[], None] = lambda: None
) -> SmMenu:
    """The best kind of shares that this GPU allows; logs which and why.

    cuda: torch.cuda, initialised. load_driver: imports cuda.bindings.driver, where it is installed. first_work: what a
    thread runs when it first queues on a share. The whole device is a stream of its own, not the default one, which
    would wait for, and be waited for by, others.
    """
    num_sms = cuda.get_device_properties(device_index).multi_processor_count
    whole = SmPartition("whole", num_sms, cuda.Stream(device_index), cuda, FirstWork(first_work))
    try:
        return _logged(_green_menu(whole, GreenSplits(load_driver(), device_index), device_index))
    except (DriverError, ImportError) as error:
        reason = f"no green contexts ({error})"
    least, greatest = cuda.Stream.priority_range()
    if greatest < least:
        return _logged(_priority_menu(whole, device_index, greatest, reason))
    reason += "; no stream priorities (the GPU has but one)"
    note = f"{num_sms} SMs: draft and target run in turn ({reason})"
    return _logged(SmMenu(PartitionMenu(whole, (), note), PartitionChoice("serial", reason)))


def _green_menu(whole: SmPartition, green: GreenSplits, device_index: int) -> SmMenu:
    cuda = whole.cuda

    def share(name: str, opened: GreenShare) -> SmPartition:
        stream = cuda.ExternalStream(opened.stream, device=device_index)
        return SmPartition(name, opened.num_sms, stream, cuda, whole.first_work)

    splits = tuple((share("draft", draft), share("target", target)) for draft, target in green.splits)
    names = ", ".join(split_name(*split) for split in splits)
    reason = f"{green.num_sms} SMs in groups of {green.group_sms}" + (f"; {green.note}" if green.note else "")
    note = f"{whole.size} SMs: in turn on all, or green contexts {names} ({reason})"
    return SmMenu(PartitionMenu(whole, splits, note), PartitionChoice("green_contexts", reason), green.close)


def _priority_menu(whole: SmPartition, device_index: int, greatest: int, reason: str) -> SmMenu:
    """Both shares may use every SM. The draft's kernels are short and go first, or they would queue behind the
    target's blocks, and what they fill is what those leave."""
    cuda = whole.cuda
    draft = SmPartition("draft", whole.size, cuda.Stream(device_index, priority=greatest), cuda, whole.first_work)
    target = SmPartition("target", whole.size, cuda.Stream(device_index, priority=0), cuda, whole.first_work)
    note = f"{whole.size} SMs: in turn, or at once on streams of two priorities ({reason})"
    return SmMenu(PartitionMenu(whole, ((draft, target),), note), PartitionChoice("priority_streams", reason))


def _logged(menu: SmMenu) -> SmMenu:
    level = logging.INFO if menu.choice.kind == "green_contexts" else logging.WARNING
    _log.log(level, "GPU partitions: %s (%s)", menu.choice.kind, menu.choice.reason)
    return menu


class StreamLanes:
    """Two threads, each queueing on the stream of its share of one GPU; implements core.ports.Lanes.

    Who may read what, when: the host takes turns, but streams do not wait for each other by themselves. So a run of
    both lanes is a fork and a join of streams. What the calling thread queued before (prompts in the KV pools,
    sampling parameters, the hidden rows and logits of a step in turn) is ordered before everything on both lanes;
    everything on both lanes is ordered before what the calling thread queues afterwards (log-probabilities of the
    target's logits, the next step on the whole device, the next fork). Between fork and join a lane touches the pool of
    its own model alone. All other work of an engine is queued by the thread that steps, which is bound to the one
    stream of the whole device. So any two uses of a pool are ordered, on whatever partitions they ran, and memory that
    torch reuses is no exception: it is freed and taken on one side of a fork or join. The host never waits for any of
    this.
    """

    def __init__(self, draft: SmPartition, target: SmPartition) -> None:
        self._cuda = target.cuda
        self._threads = ThreadLanes(draft, target)
        # One event each for good: a wait is for what had been recorded when it was queued, not for later recordings.
        self._forked, self._verified, self._proposed = (self._cuda.Event() for _ in range(3))

    def on_draft(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the draft's thread and stream, between a fork and a join, and waits for the thread."""
        return self._alone(self._threads.on_draft, work, self._proposed)

    def on_target(self, work: Callable[[], Result]) -> Result:
        """As on_draft, on the target's thread and stream."""
        return self._alone(self._threads.on_target, work, self._verified)

    def run_both(self, verify: Callable[[], Verified], propose: Callable[[], Proposed]) -> tuple[Verified, Proposed]:
        """See core.ports.Lanes. The results are ready for what the calling thread queues next."""
        caller = self._fork()
        try:
            return self._threads.run_both(self._between(verify, self._verified), self._between(propose, self._proposed))
        finally:  # also where a phase failed: what it had queued may still run
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
        """`work` on a lane: behind the fork, with `ended` recorded behind what it queued, also where it raised."""

        def run() -> Result:
            stream = self._cuda.current_stream()
            stream.wait_event(self._forked)
            try:
                return work()
            finally:
                ended.record(stream)

        return run
