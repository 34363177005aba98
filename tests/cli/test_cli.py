"""The `faser` command in process: what it prints and in which words, what it refuses, the demo pair's cache."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from faser_backend.cli import options as cli_options
from faser_backend.cli.doctor import examine
from faser_backend.cli.main import COMMANDS, app
from faser_backend.core.errors import ConfigError
from faser_backend.device.partition import core_partitions
from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest
from faser_backend.places import DEMO_PAIR, MODEL_REPO
from faser_backend.policy.registry import KNOWN_POLICIES
from faser_backend.triton.server import write_launch_copy
from faser_backend.version import VERSION
from tests.support.serving_pair import write_pair

SAMPLED = ["--temperature", "1", "--seed", "3", "--num-threads", "1"]


def test_generate_json_is_complete_and_repeats_with_its_seed(run, engine_dir):
    command = ("generate", "--engine-dir", engine_dir, "--prompt", "def f", "--max-tokens", 30, "--json", *SAMPLED)
    command = (*command, "--policy", "fixed:4")  # which verifies every row that it drafted
    status, out, _ = run(*command)
    result = json.loads(out)
    assert status == 0
    assert 1 <= len(result["token_ids"]) <= 30 and result["text"]
    assert 0 < result["num_accepted"] <= result["num_drafted"] and result["num_pruned"] == 0
    assert result["num_drafted_by_source"] == {"model": result["num_drafted"]}
    assert result["tokens_per_s"] > 0 and result["finish_reason"] in ("length", "end_id")
    assert json.loads(run(*command)[1])["token_ids"] == result["token_ids"]
    plain = json.loads(run(*command, "--policy", "none")[1])
    assert plain["token_ids"] == result["token_ids"] and plain["num_drafted"] == 0


def test_generate_prints_the_text_then_its_figures(run, engine_dir):
    options = ("--engine-dir", engine_dir, "--prompt-ids", "5,6,7", "--max-tokens", 20, *SAMPLED)
    text = json.loads(run("generate", *options, "--json")[1])["text"]
    stopped = json.loads(run("generate", *options, "--json", "--stop", text[5:7])[1])
    assert stopped["text"] == text[: text.index(text[5:7]) + 2] and stopped["finish_reason"] == "stop_words"
    status, out, _ = run("generate", *options)
    assert status == 0
    assert out.startswith(text) and "tokens/s; accepted " in out[len(text) :]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens = 0: must be at least 1"),
        (["--prompt", "x", "--temperature", "nan"], "temperature = nan: must lie in [0, 100]"),
        (["--prompt", "x", "--policy", "best"], "policy = 'best': unknown; known are none"),
        (["--prompt", ""], "prompt = '': is empty; at least 1 token is needed"),
        (["--prompt-ids", "1,two"], "--prompt-ids = '1,two': must be integers separated by commas"),
        (["--prompt-ids", "1,99999"], "input_ids = 99999: token ids must lie in"),
        ([], "give exactly one of --prompt and --prompt-ids"),
        (["--prompt", "x", "--system", "s"], "--system = 's': is for conversations: give --chat too"),
        (["--prompt", "x", "--messages", "m.json"], "--messages = 'm.json': is for conversations"),
        (["--prompt", "x", "--chat-template", "t"], "--chat-template = 't': is for conversations"),
        (["--chat"], "give exactly one of --prompt and --messages with --chat"),
        (["--chat", "--prompt", "x", "--messages", "m.json"], "give exactly one of --prompt and --messages"),
        (["--chat", "--prompt-ids", "1"], "--prompt-ids = [1]: cannot be a message"),
        (["--chat", "--messages", "m.json", "--system", "s"], "--system = 's': write it into the file"),
        (["--chat", "--messages", "none.json"], "--messages = 'none.json': not readable as text"),
        (["--chat", "--messages", __file__], "invalid JSON: "),
        (["--chat", "--prompt", "x", "--chat-template", "none"], "chat_template = none: not readable"),
    ],
)
def test_bad_input_is_one_line_and_status_1(run, engine_dir, tmp_path, options, message):
    needs_model = message.startswith(("policy", "input_ids", "chat_template"))  # others are refused before engines
    directory = engine_dir if needs_model else tmp_path / "none"
    status, out, err = run("generate", "--engine-dir", directory, *options)
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert err.startswith("error: ") and message in err


def test_serve_refuses_before_it_starts_anything(run, engine_dir, tmp_path):
    target, gguf = engine_dir.parent / "pair" / "target", tmp_path / "some model.gguf"
    for given, *options, message in (
        (tmp_path / "new", "manifest.json: missing; build engines into this directory first"),
        (target, f"a checkpoint, no engine directory; run `faser serve {target}` or `faser build --target {target} "),
        (gguf, f"or `faser build --target '{gguf}' --output DIR`"),
        (target / "config.json", "config.json: a file, not an engine directory; `faser build"),
        (target.parent, "pair/manifest.json: missing; `faser build"),
        (engine_dir, "--policy", "x", "policy = 'x'"),
        (engine_dir, "--http-port", 70000, "http-port = 70000: must lie in [1, 65535]"),
        (engine_dir, "--policy", "x", "--tls-cert", "c", "--tls-cert = c: is for OpenAI's API: give --openai-port too"),
        (engine_dir, "--policy", "x", "--openai-host", "0.0.0.0", "--openai-host = 0.0.0.0: is for OpenAI's API"),
    ):
        gguf.touch()
        status, _, err = run("serve", "--engine-dir", given, *options)
        assert status == 1 and message in err and err.count("\n") == 1


def test_stop_requests_are_off_where_others_reach_the_server(run, engine_dir, monkeypatch):
    seen: list[str] = []
    serve = lambda _, parameters, **__: seen.append(parameters["stop_requests"])  # noqa: E731
    monkeypatch.setattr("faser_backend.triton.launch.serve_until_signalled", serve)
    for options in ((), ("--expose-triton",), ("--expose-triton", "--stop-requests", "on")):
        run("serve", "--engine-dir", engine_dir, *options)
    assert seen == ["on", "off", "on"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "nowhere"], "--target = 'nowhere': no such file or directory\n"),
        (["--target", "some/model"], "`hf download some/model --local-dir DIR`, then --target DIR\n"),
        (["--target", DEMO_PAIR / "target/model.safetensors"], f"name its directory: --target {DEMO_PAIR}/target\n"),
        (["--target", __file__], "no GGUF file: 'GGUF magic invalid'\n"),
        (["--target", DEMO_PAIR / "target", "--max-context", 8], "max_context = 8: Input should be greater than or"),
    ],
)
def test_build_says_what_was_probably_meant(run, tmp_path, options, message):
    status, _, err = run("build", *options, "--output", tmp_path / "engine")
    assert status == 1 and message in err and err.count("\n") == 1
    assert not (tmp_path / "engine").exists()


def test_build_makes_a_directory_that_loads(run, tmp_path):
    pair = write_pair(tmp_path / "pair")
    output = tmp_path / "engine"
    command = ("build", "--target", pair / "target", "--draft", pair / "draft", "--output", output)
    status, out, err = run(*command, "--exit-layers", "1,2")
    assert status == 0 and str(output) in out and "step 1 of" in err
    assert EngineManifest.load(output).exit_layers == (1, 2)
    status, _, err = run(*command, "--exit-layers", "7")
    assert status == 1 and "error: exit_layers" in err
    status, out, _ = run(*command)
    assert status == 0 and out.endswith("; replaces the engines that were there\n")
    status, _, err = run("build", "--target", pair / "target", "--output", pair)
    assert status == 1 and "has files that are no engines; name a new or an empty directory\n" in err


def test_doctor_tells_what_can_run_and_the_version_is_printed(run):
    assert run("--version") == (0, f"faser {VERSION}\n", "")
    status, out, _ = run("doctor")
    assert status == 0 and "This machine can serve." in out
    found = {entry["name"]: entry for entry in json.loads(run("doctor", "--json")[1])}
    assert found["Triton server"]["is_ok"] and found["CPU kernels"]["is_needed"]
    assert found["CPU partitions"]["detail"] == core_partitions().note
    assert [finding.name for finding in examine()] == list(found)


def test_demo_engines_are_built_once_by_two_processes_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "cache"))
    code = "from faser_backend.serving import loading, model_source\nwith loading.reporting_to(print):\n    "
    command = [sys.executable, "-c", f"{code}print(model_source.demo_engine_dir())"]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [worker.communicate(timeout=60)[0] for worker in workers]
    assert told[0].split()[-1] == told[1].split()[-1] and sorted("building" in each for each in told) == [False, True]


def test_launch_copy_writes_policy_and_parameters_and_leaves_the_repository_alone(tmp_path):
    before = {path: path.read_bytes() for path in MODEL_REPO.rglob("config.pbtxt")}
    odd = 'a "quoted" \\ folder'
    write_launch_copy(MODEL_REPO, tmp_path / "copy", {"engine_dir": odd}, is_decoupled=False)
    text = (tmp_path / "copy" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert 'string_value: "a \\"quoted\\" \\\\ folder"' in text and '"${policy}"' in text
    assert all("decoupled: true" not in path.read_text() for path in (tmp_path / "copy").rglob("config.pbtxt"))
    assert {path: path.read_bytes() for path in MODEL_REPO.rglob("config.pbtxt")} == before
    with pytest.raises(ConfigError, match="parameter colour: no model of model_repo has such a parameter"):
        write_launch_copy(MODEL_REPO, tmp_path / "other", {"colour": "red"}, is_decoupled=True)


def test_paths_reach_models_whose_python_has_ascii_names():
    given = json.dumps({"parameters": {"chat_template": {"string_value": "é"}}})
    code = f"from faser_backend.serving.parameters import given_parameters; print(ascii(given_parameters({given})))"
    names = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=names)
    assert done.stdout == "{'chat_template': '\\udcc3\\udca9'}\n", "the bytes of the name, as Python keeps them"


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


def test_forced_overlap_and_a_forced_exit_say_what_is_missing(run, engines: dict[bool, Path]):
    overlap, early = ("--pipeline", "run_ahead"), ("--early-exit", "on")
    for has_exit, option, missing in (
        (False, overlap, "pipeline = 'run_ahead' with policy = 'faser'.* run `faser profile`"),
        (False, early, "no exits; build it with --exit-layers"),
        (True, early, "no profile, which calibrates"),
    ):
        for command in (("generate", *PROMPT), ("serve",)):
            status, _, err = run(*command, "--engine-dir", engines[has_exit], *option)
            assert status == 1 and re.search(missing, err.splitlines()[-1])
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
