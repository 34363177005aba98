"""Detection of hung processes, leftovers of killed servers and repeated starts, without Triton."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faser_backend.core.errors import ConfigError
from faser_backend.serving.engine_loop import EngineLoop
from faser_backend.triton import server
from faser_backend.triton.launch_folder import BUSY_FACTOR, LOCK_FILE, PREFIX, SHARED_MEMORY, HangWatch, LaunchFolder
from faser_backend.triton.server import LOCK_ERROR, TritonInstall, TritonServer
from tests.support.harness import open_fake
from tests.support.processes import wait_until
from tests.support.served import on_free_ports

LIMIT_S = 0.3
BEATING = """
import sys, time
from pathlib import Path
from faser_backend.triton.launch_folder import Heartbeat
beat = Heartbeat(Path(sys.argv[1]))
beat.beat()
print("beats", flush=True)
"""
LOOPS = {
    "beats": "while True: beat.beat(); time.sleep(0.02)",
    "waits": "time.sleep(60)",
    "computes": "while True: pass",
    "has ended": "beat.close(); time.sleep(60)",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchFolder]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = LaunchFolder()
    yield made
    made.remove()


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen]:
    """Starts a Python program and waits for its first line."""
    started = subprocess.Popen([sys.executable, "-c", *map(str, arguments)], stdout=subprocess.PIPE)
    try:
        assert started.stdout is not None and started.stdout.readline()
        yield started
    finally:
        started.kill()
        started.communicate()


def watched(watch: HangWatch, pid: int, seconds: float) -> float | None:
    """Checks repeatedly. Returns how long the process was silent when it was found to hang."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if pid in (hung := watch.hung([pid])):
            return hung[pid]
        time.sleep(0.05)
    return None


@pytest.mark.parametrize(("loop", "hangs"), [(loop, loop == "waits") for loop in LOOPS])
def test_who_neither_shows_progress_nor_computes_hangs(folder: LaunchFolder, loop: str, hangs: bool):
    with process(BEATING + LOOPS[loop], folder.path) as started:
        silent = watched(HangWatch(folder.path.name, LIMIT_S), started.pid, 3.0 if hangs else 4 * LIMIT_S)
        assert (silent is not None) == hangs
        started.send_signal(signal.SIGSTOP)
        assert watched(HangWatch(folder.path.name, LIMIT_S), started.pid, 10.0)
        assert watched(HangWatch(folder.path.name, 0.0), started.pid, 2 * LIMIT_S) is None, "the limit is off"


def test_who_computes_without_progress_hangs_in_the_end(folder: LaunchFolder):
    with process(BEATING + LOOPS["computes"], folder.path) as started:
        silent = watched(HangWatch(folder.path.name, 0.15), started.pid, 20.0)
        assert silent is not None and silent > BUSY_FACTOR * 0.15


def test_who_watches_may_have_been_stopped_with_all_the_others(folder: LaunchFolder):
    now = [0.0]
    with process(BEATING + LOOPS["waits"], folder.path) as started:
        watch = HangWatch(folder.path.name, 5.0, clock=lambda: now[0])
        watch.hung([started.pid])
        found = []
        for _ in range(8):
            now[0] += 3600.0
            found.append(bool(watch.hung([started.pid])))
        assert found == [False] * 5 + [True] * 3  # each check counts as one second


def test_the_loop_of_the_engine_beats_in_steps_and_without_work():
    beats: list[int] = []
    loop = EngineLoop(open_fake("none").engine, beat=lambda: beats.append(1))
    wait_until(lambda: len(beats) >= 3)
    loop.close()


def test_what_a_killed_server_left_is_removed_by_the_next_start_and_nothing_else(folder: LaunchFolder):
    make = "import time\nfrom faser_backend.triton.launch_folder import LaunchFolder\n"
    make += "made = LaunchFolder()\nprint(made.path, flush=True)\ntime.sleep(60)"
    unknown = folder.path.parent / f"{PREFIX}unknown"
    unknown.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", make],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        region = SHARED_MEMORY / f"{left.name}-region"
        region.touch()
        LaunchFolder().remove()
        assert (left / LOCK_FILE).exists() and region.exists(), "its owner runs"
        owner.kill()
        owner.wait()
        LaunchFolder().remove()
    assert not left.exists() and not region.exists()
    assert folder.path.exists() and unknown.exists()


FAKE_SERVER = """#!/bin/sh
echo "$0" >> {starts}
seq 2000
echo "terminate called after throwing an instance of '{error}'"
exit 1
"""


@pytest.mark.parametrize(("error", "num_starts"), [(LOCK_ERROR, 4), ("another::exception", 1)])
def test_a_start_that_meets_a_lock_exception_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, num_starts: int
):
    binary, starts = tmp_path / "tritonserver", tmp_path / "starts"
    binary.write_text(FAKE_SERVER.format(starts=starts, error=error))
    binary.chmod(0o700)
    monkeypatch.setattr(server, "find_triton", lambda: TritonInstall(binary))
    monkeypatch.setattr(server, "MAX_LOG_BYTES", 1000)
    with TritonServer(on_free_ports()) as running:
        with pytest.raises(ConfigError, match=error):
            running.wait_ready()
        assert len(starts.read_text().splitlines()) == num_starts and running.log_file.stat().st_size < 1100
