"""Fixtures that several files share."""

from __future__ import annotations

import signal
import sys

import pytest

from faser_backend.cli import main

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts what it runs in the background so, and children inherit it: tests that press Ctrl-C would wait.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `faser ARGUMENTS`; returns status, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["faser", *map(str, arguments)])
        capsys.readouterr()
        on_broken_pipe = signal.getsignal(signal.SIGPIPE)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            signal.signal(signal.SIGPIPE, on_broken_pipe)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run
