"""`faser chat`: a conversation from a pipe and from a terminal."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faser_backend import LLM, SamplingParams
from tests.support.serving_pair import copy_without_template

ROOT = Path(__file__).resolve().parents[2]
FIGURES = re.compile(r"== (\d+) tokens, [\d.,]+ tokens/s; accepted (\d+) of (\d+) drafted tokens \(\d+%\)")
OPTIONS = ("--max-tokens", 12, "--policy", "fixed:3", "--num-threads", 1)


@pytest.fixture
def talk(run, engine_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """`faser chat OPTIONS` with lines from a pipe; returns status, stdout and stderr."""

    def talk(text: str, *options: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return run("chat", "--engine-dir", engine_dir, *OPTIONS, *options)

    return talk


def test_a_conversation_from_a_pipe(talk, engine_dir: Path):
    status, out, _ = talk("Größe?\n\nUnd?\n/reset\nGröße?\n/quit\nnever read\n")
    assert status == 0
    with LLM(engine_dir, num_threads=1) as llm:
        params, asked = SamplingParams(max_tokens=12), {"role": "user", "content": "Größe?"}
        first = llm.chat([asked], params)[0].text
        more = [asked, {"role": "assistant", "content": first}, {"role": "user", "content": "Und?"}]
        second = llm.chat(more, params)[0].text
    assert first != second and "\x1b" not in out  # without colour nothing is marked
    for text in (first, second, first):
        assert out.startswith(text + "\n"), out
        out = out[len(text) + 1 :]
        figures = FIGURES.match(out)
        assert figures is not None, out
        assert int(figures[1]) <= 12 and int(figures[2]) <= int(figures[3]) > 0
        out = out[out.index("\n") + 1 :].removeprefix("== a new conversation\n")
    assert out == ""


def test_the_end_of_the_input_and_a_system_message(talk):
    plain, told = talk("x"), talk("x", "--system", "Be brief.")
    assert plain[0] == told[0] == 0 and plain[1].split("==")[0] != told[1].split("==")[0]
    assert talk("")[:2] == (0, "")


def test_drafted_tokens_are_coloured_where_there_is_colour(talk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m" in talk("x\n")[1]
    assert "\x1b[32m" not in talk("x\n", "--policy", "none")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in talk("x\n")[1]


def test_what_cannot_be_answered_is_one_line(talk, engine_dir: Path, tmp_path: Path):
    status, out, _ = talk("y " * 2400 + "\nx\n")
    assert status == 0 and "input_ids length = " in out and "; /reset starts over\n" in out
    assert FIGURES.search(out)  # of the message that followed
    assert talk("x\n", "--temperature", "-1")[::2] == (1, "error: temperature = -1.0: must lie in [0, 100]\n")
    (tmp_path / "empty.jinja").write_text("{{ raise_exception('no') }}")
    refused = talk("x\n", "--chat-template", tmp_path / "empty.jinja")
    assert refused[0] == 0 and "the chat template refuses them: no" in refused[1]
    status, _, err = talk("x\n", "--engine-dir", copy_without_template(engine_dir, tmp_path / "plain"))
    assert status == 1 and "came without a chat template" in err.splitlines()[-1]


def test_ctrl_c_ends_an_answer_and_not_the_conversation(engine_dir: Path):
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "faser_backend.cli", "chat", "--num-threads", "1", "--engine-dir", str(engine_dir)]
    child = subprocess.Popen(
        [*command, "--max-tokens", "480", "--temperature", "1", "--seed", "3"],
        cwd=ROOT, stdin=terminal, stdout=terminal, stderr=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(terminal)
    left = b""  # of what was read

    def read_until(words: bytes) -> None:
        nonlocal left
        deadline = time.monotonic() + 60
        while words not in left:
            assert time.monotonic() < deadline, left
            if select.select([main], [], [], 0.5)[0]:
                left += os.read(main, 4096)
        left = left[left.index(words) + len(words) :]

    try:
        read_until(b"> ")
        os.write(main, b"x\n/reset\n" * 5 + b"/quit\n")  # an answer takes 0.2 s, this process may be halted longer
        read_until(b"\x1b[32m")  # accepted tokens of an answer
        child.send_signal(signal.SIGINT)
        read_until(b"interrupted")
        read_until(b"a new conversation")
        with pytest.raises(OSError, match="Input/output"):  # the terminal ends with the child
            read_until(b"nothing prints this")
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
        os.close(main)
