"""`ThreadLanes`: one lasting thread for each model on its share of the device; implements core.ports.Lanes.

Work is handed over by future. Both phases leave the calling thread, which stays unpinned and merely waits: were
one of them to run there, the scheduler could put it on the other's cores. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from faser_backend.core.errors import ConfigError
from faser_backend.device.partition import ComputePartition

Result = TypeVar("Result")
Verified = TypeVar("Verified")
Proposed = TypeVar("Proposed")


class ThreadLanes:
    """Threads of a draft share and of a target share. Each runs what it is given in turn."""

    def __init__(self, draft: ComputePartition, target: ComputePartition) -> None:
        """Starts and binds both threads. Raises ConfigError where this process may not use a share."""
        self._draft = _bound_executor(draft)
        try:
            self._target = _bound_executor(target)
        except ConfigError:
            self._draft.shutdown()
            raise

    def on_draft(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the draft's thread and waits for it. Threads that it starts stay on the draft's cores:
        open sessions here, for these are the threads that they compute with."""
        return self._draft.submit(work).result()

    def on_target(self, work: Callable[[], Result]) -> Result:
        """As on_draft, on the target's thread and cores."""
        return self._target.submit(work).result()

    def run_both(self, verify: Callable[[], Verified], propose: Callable[[], Proposed]) -> tuple[Verified, Proposed]:
        """See core.ports.Lanes: waits for both also where one fails; the target's error goes first."""
        verifying = self._target.submit(verify)  # first: it is what usually takes longer
        proposing = self._draft.submit(propose)
        _raise_first_error(verifying, proposing)
        return verifying.result(), proposing.result()

    def close(self) -> None:
        """Waits for what is running and ends both threads. May be called again."""
        self._target.shutdown()
        self._draft.shutdown()


def _raise_first_error(*futures: Future) -> None:
    """Waits for all of them first."""
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


def _bound_executor(partition: ComputePartition) -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(1, f"{partition.name}-lane")
    try:  # here and not as the executor's initializer, whose errors are logged but not handed on
        executor.submit(partition.bind_current_thread).result()
    except (OSError, RuntimeError) as error:  # of the system, of a GPU
        executor.shutdown()
        raise ConfigError(f"partition {partition.name}: {partition} cannot be used ({error})") from error
    return executor
