"""Runs the programs of examples/ and the commands of README and of docs/tutorial-serve.md against one server."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faser_backend import LLM, SamplingParams
from faser_backend.lab.checks.servers import free_ports
from tests.support.served import serve
from tests.support.serving_pair import write_pair
from tests.test_docs import blocks, command_lines

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
OFFLINE = ("offline_batch.py", "policy.py")
CLIENTS = ("grpc_stream.py", "http_stream.py", "openai_client.py")
PROMPT = "def read_lines(path):\n"


@pytest.fixture(scope="module")
def ports(engine_dir: Path) -> Iterator[dict[int, int]]:
    """Returns the ports of one server under the documented ones."""
    [port] = free_ports(1)
    options = ("--engine-dir", engine_dir, "--num-threads", 1, "--policy", "fixed:3", "--openai-port", port)
    with serve(*options) as served:
        yield {8000: served.http_port, 8001: served.grpc_port, 8002: served.metrics_port, 9000: port}


@pytest.fixture(scope="module")
def addresses(ports: dict[int, int]) -> dict[str, str]:
    """Returns the server's address for each example."""
    urls = (f"127.0.0.1:{ports[8001]}", f"http://127.0.0.1:{ports[8000]}", f"http://127.0.0.1:{ports[9000]}/v1")
    return dict(zip(CLIENTS, urls, strict=True))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs examples/NAME ARGUMENTS; returns its output."""

    def example(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return example


def greedy(engine_dir: Path, *prompts: str) -> list[str]:
    with LLM(engine_dir, policy="none", num_threads=1) as llm:
        return [output.text for output in llm.generate(list(prompts), SamplingParams(max_tokens=40))]


def test_there_is_a_test_of_each_and_each_is_short():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(OFFLINE + CLIENTS)
    for path in EXAMPLES.glob("*.py"):
        assert path.read_text().count("\n") <= 40, path


def test_clients_print_what_the_engine_says(example, addresses: dict[str, str], engine_dir: Path):
    (text,) = greedy(engine_dir, PROMPT)
    assert example("grpc_stream.py", addresses["grpc_stream.py"]) == text + "\n"
    by_openai = example("openai_client.py", addresses["openai_client.py"])
    assert by_openai.startswith(text + "\n== ") and by_openai.endswith("draft tokens accepted\n")
    sampled = example("http_stream.py", addresses["http_stream.py"])
    assert len(sampled) > 20 and sampled != text + "\n"
    assert sampled == example("http_stream.py", addresses["http_stream.py"])  # it has a seed


@pytest.mark.parametrize("name", CLIENTS)
def test_a_server_that_is_not_there_is_an_error_with_its_address(example, name: str):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(SystemExit, match=f"^error: .*{address}"):
        example(name, address if name.startswith("grpc") else f"http://{address}")


def test_the_offline_batch(example, engine_dir: Path):
    out = example("offline_batch.py", engine_dir)
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith("== '")] == [
        "== 'def read_lines(path)",
        "== 'import os\\n'",
        "== 'class Stack",
    ]


def test_the_policy_drafts_and_changes_no_token(example, engine_dir: Path):
    out = example("policy.py", engine_dir)
    for text in greedy(engine_dir, "def add(a, b):\n", "import os\n"):
        assert f"draft tokens accepted\n{text}\n" in out
    assert "== 0 of 0" not in out


def test_the_calls_in_readme_are_answered(ports: dict[int, int]):
    calls = [words for words in command_lines(EXAMPLES.with_name("README.md")) if words[0] == "curl"]
    assert len(calls) >= 2
    for words in calls:
        line = shlex.join(["curl", "--fail", "--max-time", "60", *words[1:]])
        for documented, port in ports.items():
            line = line.replace(f"localhost:{documented}", f"localhost:{port}")
        done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0 and "text" in done.stdout, (words, done.stdout, done.stderr)


def test_the_commands_of_the_tutorial_do_what_it_says(ports: dict[int, int], tmp_path: Path):
    """Runs each with a tiny checkpoint, measuring briefly; test_conformance.py starts `faser serve`."""
    (write_pair(tmp_path / "pair") / "target").rename(tmp_path / "smollm2")
    script = "".join(blocks((EXAMPLES.with_name("docs") / "tutorial-serve.md").read_text(), "bash"))
    for documented, port in ports.items():
        script = script.replace(f":{documented}", f":{port}")
    script = script.replace("replay ", f"replay --url 127.0.0.1:{ports[8001]} ").replace("curl ", "curl --fail ")
    script = re.sub("profile .* --quick", r"\g<0> --budget-s 1", script).replace("--budget-s 60", "--budget-s 1")
    script = script.replace("--rate 5", "--rate 50")
    there: Any = {"cwd": tmp_path, "env": {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}}
    said = ""
    for line in script.splitlines():
        if not line.startswith("faser serve"):
            done = subprocess.run(
                ["bash", "-c", line], **there, capture_output=True, text=True, timeout=300, check=False
            )
            said += done.stdout + done.stderr
            assert done.returncode == 0, (line, said)
    for expected in ("mean_acceptance_length", "faser:steps_total", "accepted .* drafted", "30 of 30 sent", "of none"):
        assert re.search(expected, said), (expected, said)
    assert (tmp_path / "faser-bench" / "report.html").exists()
