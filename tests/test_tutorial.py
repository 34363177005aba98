"""docs/tutorial-policy.md: `generate`, `simulate` and `bench` load its policy by path."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from faser_backend.cli.main import app
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.lab.checks.control_worlds import all_worlds, run
from faser_backend.policy.registry import parse_policy
from tests.pipeline.test_engine import alone, random_requests
from tests.support.harness import drive, fake_engine, guessed

TUTORIAL = Path(__file__).resolve().parents[1] / "docs" / "tutorial-policy.md"


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the tutorial's file."""
    (code,) = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), flags=re.DOTALL)
    assert code.count("\n") <= 40
    path = tmp_path_factory.mktemp("tutorial") / "caution.py"
    path.write_text(code)
    return path


def test_answers_are_those_of_plain_decoding(policy_file: Path):
    requests = random_requests(0, 8)
    engine, _ = fake_engine(parse_policy(f"file:{policy_file}", guessed))
    assert drive(engine, requests).tokens == alone(requests)
    assert engine.metrics().num_accepted > 0


def test_it_follows_acceptance(policy_file: Path):
    """In virtual time with cheap drafts: better than none."""
    world = next(world for world in all_worlds() if world.name == "memory bound, 8")
    assert run(world, f"file:{policy_file}", 0)["tokens_per_s"] > 1.2 * run(world, "none", 0)["tokens_per_s"]


def test_every_command_does_what_the_tutorial_says(policy_file: Path):
    """Runs each command as written, in the file's folder; a pipe gets the whole table."""
    [commands] = re.findall(r"```bash\n(.*?)```", TUTORIAL.read_text(), flags=re.DOTALL)
    there = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    there.pop("COLUMNS", None)
    options: Any = {"cwd": policy_file.parent, "env": there, "capture_output": True, "text": True, "timeout": 300}
    done = [subprocess.run(["bash", "-c", line], check=False, **options) for line in commands.splitlines()]
    assert [each.returncode for each in done] == [0] * 4, done
    assert re.search(r"accepted \d+ of [1-9]\d* drafted", done[0].stdout)
    shown = done[3].stdout
    assert all(re.search(rf"^{each} +\d.*%  +\d+ *$", shown, re.M) for each in ("none", "fixed:4", "file:caution.py"))
    assert "mean batch" in shown, "the last column"
    name = "file:caution.py"
    found = json.loads((policy_file.parent / "faser-simulation" / "simulation.json").read_text())["rows"]
    assert name in {row["policy"] for row in found}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "FileNotFoundError"),
        ("make_policy = 1", "TypeError"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("class P:\n def decide(*_): 1 / 0\n observe = decide\nmake_policy = lambda _: P()", "ZeroDivisionError"),
    ],
)
def test_a_file_that_is_no_policy_or_raises_is_named(tmp_path: Path, content: str | None, message: str):
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    for name in ("decide", "observe"):
        with pytest.raises(FaserError, match=f"^policy = 'file:{path}': {message}: ") as caught:
            getattr(parse_policy(f"file:{path}", guessed), name)([])
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "as `faser simulate` receives it"
    with pytest.raises(ConfigError, match="Python file"):
        parse_policy("file:mine.txt", guessed)


def test_explain_tells_what_was_weighed(engine_dir: Path):
    arguments = ["--engine-dir", str(engine_dir), "--prompt-ids", "1,2,3", "--max-tokens", "24", "--explain"]
    done = CliRunner().invoke(app, ["generate", *arguments, "--policy", "faser"])
    assert done.exit_code == 0, done.output
    shown = done.stderr
    assert "plain" in shown and "serial" in shown
    marked = [line for line in shown.splitlines() if line.startswith(" *")]
    assert marked, shown
    speeds = [float(line.split()[-1]) for line in shown.splitlines() if re.match(r" [* ] (plain|serial)", line)]
    assert np.isfinite(speeds).all() and len(speeds) >= 2 * len(marked)
    silent = CliRunner().invoke(app, ["generate", *arguments, "--policy", "fixed:2"])
    assert "tokens/ms" not in silent.stderr
