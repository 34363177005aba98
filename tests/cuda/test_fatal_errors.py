"""Permanent errors of a GPU end the engine, answer its requests and are reported; other errors fail one step."""

import threading

import pytest

from faser_backend.core.errors import FaserError
from faser_backend.cuda.graphs import is_fatal
from faser_backend.pipeline.engine import Engine
from faser_backend.serving.engine_loop import EngineLoop, Subscription
from tests.support.harness import FakeEngine, open_fake, request


class AcceleratorError(RuntimeError):
    """A fake of torch's error, which carries CUDA's number."""

    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


def chained(cause: Exception) -> Exception:
    """Returns an error as a step raises it: from another, raised while handling a third."""
    try:
        try:
            raise cause
        except Exception as error:
            raise ValueError("the call failed") from error
    except ValueError as error:
        return error


FATAL = [
    AcceleratorError("CUDA error", 700),
    AcceleratorError("CUDA error: unknown error", 999),
    RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronous"),
    RuntimeError("Triton Error [CUDA]: misaligned address"),
    FaserError("target.0.engine: execute: Cuda Runtime (unspecified launch failure)"),
    chained(RuntimeError("CUDA error: device-side assert triggered")),
]
SURVIVED = [
    AcceleratorError("CUDA error: out of memory", 2),
    AcceleratorError("CUDA error: operation not permitted when stream is capturing", 900),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    ValueError("misaligned address of a table"),
    chained(RuntimeError("unknown error")),
    FaserError("row 1 (slot 3, position 8) hold NaN"),
]


@pytest.mark.parametrize("error", [*FATAL, *SURVIVED], ids=str)
def test_what_breaks_the_context_is_fatal_and_what_the_next_step_survives_is_not(error: Exception) -> None:
    assert is_fatal(error) == (error in FATAL)


def served(error: Exception) -> tuple[list[str], EngineLoop, threading.Event, FakeEngine]:
    """Serves two requests, one after the other, with a step that raises `error`. Returns how each ended."""
    fake, stopped = open_fake("none", is_fatal=is_fatal), threading.Event()
    run = fake.step_runner.run
    raised: list[int] = []

    def fails_once(plan):
        if not raised:
            raised.append(1)
            raise error
        return run(plan)

    fake.step_runner.run = fails_once  # type: ignore[method-assign]
    loop = EngineLoop(fake.engine, on_stopped=stopped.set)
    hub, reported = Subscription(loop), []
    for name in ("a", "b"):
        try:
            hub.submit(request(name, [1, 2, 3], 4), "")
        except FaserError as refused:
            reported.append(f"refused as {refused.code.value}: {refused}")
            continue
        while True:
            outputs = hub.outputs.get(timeout=30)
            assert outputs is not None
            if outputs[-1].is_final:
                reported.append(str(outputs[-1].error or "answered"))
                break
        stopped.wait(5 if is_fatal(error) else 0)
    loop.close()
    return reported, loop, stopped, fake


def test_an_error_that_stays_ends_the_engine_with_its_requests_answered() -> None:
    reported, _, stopped, _ = served(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert reported[0].startswith("the engine stopped: RuntimeError: CUDA error: an illegal memory access")
    assert reported[1].startswith("refused as unavailable: the engine stopped") and stopped.is_set()


def test_another_fails_its_step_alone() -> None:
    reported, _, stopped, fake = served(RuntimeError("CUDA out of memory"))
    assert reported == ["the step of this request failed: RuntimeError: CUDA out of memory", "answered"]
    assert not stopped.is_set() and fake.engine.metrics().num_failed_steps == 1


def test_an_engine_that_cannot_be_prepared_is_closed_and_says_why() -> None:
    closed: list[int] = []
    threads: list[str] = []

    def prepare(_: Engine) -> None:
        threads.append(threading.current_thread().name)
        raise FaserError("warm-up failed")

    fake = open_fake("none", prepare=prepare, close=lambda: closed.append(1))
    with pytest.raises(FaserError, match="warm-up failed"):
        EngineLoop(fake.engine)
    assert threads == ["engine-loop"] and closed == [1]
