"""`StreamLanes`: two threads, each queueing on the stream of its share; implements core.ports.Lanes.

Who may read what, when: the host takes turns, but streams do not wait for each other by themselves. So a run of
both lanes is a fork and a join of streams. What the calling thread queued before (prompts in the KV pools, sampling
parameters, the hidden rows and logits of a step in turn) is ordered before everything on both lanes; everything on
both lanes is ordered before what the calling thread queues afterwards (log-probabilities of the target's logits, the
next step on the whole device, the next fork). Between fork and join a lane touches the pool of its own model alone.
All other work of an engine is queued by the thread that steps, which is bound to the one stream of the whole device.
So any two uses of a pool are ordered, on whatever partitions they ran, and memory that torch reuses is no
exception: it is freed and taken on one side of a fork or join. The host never waits for any of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from faser_backend.device.cuda.streams import SmPartition
from faser_backend.device.lanes import ThreadLanes

Result = TypeVar("Result")
Verified = TypeVar("Verified")
Proposed = TypeVar("Proposed")


class StreamLanes:
    """Lanes of a draft share and of a target share of one GPU."""

    def __init__(self, draft: SmPartition, target: SmPartition) -> None:
        self._cuda = target.cuda
        self._threads = ThreadLanes(draft, target)
        # One event each for good: a wait is for what had been recorded when it was queued, not for later recordings.
        self._forked, self._verified, self._proposed = (self._cuda.Event() for _ in range(3))

    def on_draft(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the draft's thread and stream, between a fork and a join, and waits for the thread."""
        caller = self._fork()
        try:
            return self._threads.on_draft(self._between(work, self._proposed))
        finally:
            caller.wait_event(self._proposed)

    def on_target(self, work: Callable[[], Result]) -> Result:
        """As on_draft, on the target's thread and stream."""
        caller = self._fork()
        try:
            return self._threads.on_target(self._between(work, self._verified))
        finally:
            caller.wait_event(self._verified)

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
