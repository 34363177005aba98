"""`ThreadLanes`: one lasting thread for each model on its share of the device; implements core.ports.Lanes.

Both phases of an overlapped step run on these threads, and the calling thread waits. It is not pinned, so a phase that
ran there could be scheduled on the other's cores.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from faser_backend.core.errors import ConfigError
from faser_backend.device.partition import ComputePartition

Result = TypeVar("Result")
Verified = TypeVar("Verified")
Proposed = TypeVar("Proposed")


class ThreadLanes:
    """A thread bound to the draft's share and one bound to the target's; each runs its work in order."""

    def __init__(self, draft: ComputePartition, target: ComputePartition) -> None:
        """Starts and binds both threads. Raises ConfigError if this process may not use a share."""
        self._draft = _bound_executor(draft)
        try:
            self._target = _bound_executor(target)
        except ConfigError:
            self._draft.shutdown()
            raise

    def on_draft(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the draft's thread and waits. Threads that it starts, as a runner's, stay on its cores."""
        return self._draft.submit(work).result()

    def on_target(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the target's thread and waits."""
        return self._target.submit(work).result()

    def run_both(self, verify: Callable[[], Verified], propose: Callable[[], Proposed]) -> tuple[Verified, Proposed]:
        """See core.ports.Lanes. Waits for both even if one fails; the target's error takes precedence."""
        verifying = self._target.submit(verify)  # first, because it usually takes longer
        proposing = self._draft.submit(propose)
        proposing.exception()  # waits for it, whatever the target does
        return verifying.result(), proposing.result()

    def close(self) -> None:
        """Waits for running work and ends both threads. May be called again."""
        self._target.shutdown()
        self._draft.shutdown()


def _bound_executor(partition: ComputePartition) -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(1, f"{partition.name}-lane")
    try:  # not as the executor's initializer, whose errors are only logged
        executor.submit(partition.bind_current_thread).result()
    except (OSError, RuntimeError) as error:  # OSError for cores, RuntimeError for a GPU
        executor.shutdown()
        raise ConfigError(f"partition {partition.name}: {partition} cannot be used ({error})") from error
    return executor
