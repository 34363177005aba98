"""The wheel as a user gets it: installed in a new environment and used away from the checkout."""

import os
import subprocess
import tomllib
from pathlib import Path

from faser_backend import places
from tests.test_budgets import module_graph
from tests.test_house import module_name, source_files

ROOT = Path(__file__).resolve().parents[1]


def test_an_installed_wheel_generates_away_from_the_checkout():
    """Runs scripts/check_wheel.sh without its servers: twine's checks, the wheel's data, and a text."""
    command, env = ["bash", str(ROOT / "scripts" / "check_wheel.sh"), "--quick"], {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("PASSED") == 2, done.stdout  # the wheel and the source distribution
    assert "== 32 tokens, " in done.stdout and "accepted " in done.stdout, done.stdout


def test_the_wheel_carries_only_the_laboratory_that_commands_reach():
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    excluded = tuple(pattern.rstrip("*") for pattern in find["exclude"])
    graph = module_graph({module_name(path): path.read_text() for path in source_files(".py")})
    installed = {name for name in graph if name.startswith("faser_backend.") and not name.startswith(excluded)}
    reached, waiting = set[str](), ["faser_backend.lab.commands"]
    while waiting:
        reached.add(name := waiting.pop())
        waiting += graph[name] - reached
    assert {name for name in installed if ".lab" in name} <= reached | {name.rpartition(".")[0] for name in reached}
    assert {name for name in installed if any(each.startswith(excluded) for each in graph[name])} == set()


def test_a_checkout_uses_its_own_folders_and_a_wheel_those_that_it_brought(tmp_path, monkeypatch):
    assert places.data_folder() == ROOT
    assert places.DEMO_PAIR == ROOT / "models" / "demo" and places.MODEL_REPO == ROOT / "model_repo"
    monkeypatch.setattr(places, "INSTALLED", tmp_path)
    assert places.data_folder() == tmp_path
