"""The OpenAI-compatible front end as `faser serve` keeps it: a child process, ready when it says so."""

from __future__ import annotations

import select
import signal
import subprocess
import time
from collections.abc import Callable

from faser_backend.core.errors import ConfigError
from faser_backend.serving.server import DRAIN_S, die_with_parent

START_S = 30.0


class DoorProcess:
    """One `faser openai`. Its errors go to our stderr, its first line tells that it listens. A context manager."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches `faser serve`, which then drains it once
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, no lock and no allocation
        )
        self.first_line = ""

    def wait_ready(self, *, should_stop: Callable[[], bool]) -> None:
        """Raises ConfigError where it ends or says nothing; what was wrong stands on stderr."""
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + START_S
        while not should_stop() and time.monotonic() < deadline_s:
            if select.select([self.process.stdout], [], [], 0.2)[0]:
                self.first_line = self.process.stdout.readline().strip()
                break
        if not self.first_line and not should_stop():
            raise ConfigError("the OpenAI front end did not start; its error is above")

    def stop(self, *, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Takes no new requests and lets those in flight end; kills it after DRAIN_S, or once is_hurried."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            deadline_s = time.monotonic() + DRAIN_S
            while self.process.poll() is None and time.monotonic() < deadline_s and not is_hurried():
                time.sleep(0.05)
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> DoorProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
