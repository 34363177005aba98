"""Wording of the command line: remedies, warnings, reasons, and names that nobody has to keep up to date by hand."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from faser_backend.cli import options as cli_options
from faser_backend.cli.main import COMMANDS, app
from faser_backend.engines.build import build_engines
from faser_backend.policy.registry import KNOWN_POLICIES
from faser_backend.serving.model_source import DEMO_PAIR
from tests.support.serving_pair import write_pair

PROMPT = ("--prompt-ids", "1,2,3", "--max-tokens", "4")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("words") / "pair")


@pytest.fixture(scope="module")
def engines(pair: Path) -> dict[bool, Path]:
    """Engine directories by whether they have an exit."""
    found = {has_exit: pair.parent / f"engine-{has_exit}" for has_exit in (False, True)}
    for has_exit, directory in found.items():
        build_engines(pair / "target", pair / "draft", directory, exit_layers=(1,) if has_exit else ())
    return found


def test_a_forced_exit_says_what_is_missing(run, engines: dict[bool, Path]):
    for has_exit, missing in ((False, "no exits; build it with --exit-layers"), (True, "no profile, which calibrates")):
        for command in (("generate", *PROMPT), ("serve",)):
            status, _, err = run(*command, "--engine-dir", engines[has_exit], "--early-exit", "on")
            assert status == 1 and missing in err.splitlines()[-1]
    assert run("generate", *PROMPT, "--engine-dir", engines[False], "--early-exit", "off")[0] == 0


def test_a_draft_that_is_larger_than_its_target_is_warned_of(run, tmp_path: Path):
    large, small = DEMO_PAIR / "target", DEMO_PAIR / "draft"
    for target, other, is_warned in ((small, large, True), (large, small, False)):
        command = ("build", "--target", target, "--draft", other, "--output", tmp_path / f"out-{is_warned}")
        status, _, err = run(*command)
        assert status == 0
        assert ("warning: the draft has" in err and "swapped?" in err) == is_warned


def test_help_says_of_policies_what_the_registry_does_and_does_without_numpy():
    assert KNOWN_POLICIES == cli_options.POLICIES
    code = "import sys, faser_backend.cli.main; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_no_name_is_cut_in_a_narrow_terminal(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands: Any = typer.main.get_command(app)
    listed = [command.__name__.replace("_", "-") for commands in COMMANDS.values() for command in commands]
    assert sorted(listed) == sorted(commands.commands), "every command is listed once"
    for name in listed:
        _, out, _ = run(name, "--help")
        options = [param for param in commands.commands[name].params if param.param_type_name == "option"]
        assert [each for param in options for each in (*param.opts, *param.secondary_opts) if each not in out] == []
        assert "\u2026" not in out and max(map(len, out.splitlines())) <= 80
    assert "\nSpeculation:\n  --draft" in run("serve", "--help")[1]
