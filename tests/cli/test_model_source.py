"""Models by name: from this disk and from a hub on loopback, built once; and the options of a file."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from wsgiref.simple_server import make_server

import pytest

from faser_backend.api.llm import LLM
from faser_backend.core.errors import ConfigError
from faser_backend.manifest import EngineManifest
from faser_backend.serving import model_source
from faser_backend.serving.loading import reporting_to
from faser_backend.serving.model_source import cached_engine, demo_engine_dir, find_engine, list_engines, local_source
from faser_backend.serving.parameters import RunOptions
from tests.support.serving_pair import MAX_CONTEXT, write_pair

COMMIT = "c0ffee" + 34 * "0"
URL = re.compile(r"(?:/api/models)?/([^/]+/[^/]+)(?:/(\w+)/(?:.*/)?([^/]+))?")  # repository, kind, revision or file


class Hub:
    """Folders by repository, and what goes wrong: statuses by repository; "cut" or "flipped" by file."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders, self.faults, self.num_requests = folders, dict[str, str](), 0

    def __call__(self, environ, respond):
        self.num_requests += 1
        name, kind, file = URL.fullmatch(environ["PATH_INFO"]).groups()  # type: ignore[union-attr]
        fault = self.faults.get(name) or self.faults.get(file) or ("" if name in self.folders else "401 RepoNotFound")
        headers, content = {"X-Repo-Commit": COMMIT, "X-Error-Code": fault[4:]}, b""
        if kind == "tree":
            folder = self.folders[name].iterdir()
            files = [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": ""} for path in folder]
            content = json.dumps(files).encode()
        elif kind == "resolve":
            content = (self.folders[name] / file).read_bytes()
            headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        else:
            content = json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode()
        respond(fault if fault[:1] == "4" else "200 OK", [*headers.items(), ("Content-Length", str(len(content)))])
        content = {"cut": content[:-9], "flipped": content[:-1] + b"!"}.get(fault, content)
        return [content] if environ["REQUEST_METHOD"] == "GET" else []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("named") / "pair")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "engines"))


def test_a_hubs_model_is_built_once_and_what_goes_wrong_is_one_line_and_builds_nothing(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub = Hub({"org/small": pair / "target", "org/gated": pair, "org/bare": pair})
    server = make_server("127.0.0.1", 0, hub)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"

    def generate(name: str, **environment: str) -> tuple[int, str, str]:
        given = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hub"), **environment}
        command = [sys.executable, "-m", "faser_backend.cli", "generate", name, "--draft", "ngram", "--prompt", "x"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=given)
        return done.returncode, done.stdout.partition("\n== ")[0], done.stderr

    own = {"ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path / "hub" / "hub")}
    own["HUGGINGFACE_CO_URL_TEMPLATE"] = url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, constants, hub.faults, words in (  # in this process, which is faster
        ("org/none", {}, {}, f"and {url} has no such repository, or a private one: log in with `hf auth login`"),
        ("org/gated", {}, {"org/gated": "403 GatedRepo"}, f"access is restricted: ask for it at {url}/org/gated"),
        ("org/small@v9", {}, {"v9": "404 RevisionNotFound"}, "the repository has no revision v9"),
        ("org/bare", {}, {}, "the repository has no safetensors; for a GGUF file, add :file.gguf"),
        ("org/small:other.gguf", {}, {}, "the repository has no other.gguf"),
        ("org/small", {"HF_HUB_OFFLINE": True}, {}, "HF_HUB_OFFLINE is set"),
        ("org/small", {"ENDPOINT": "http://127.0.0.1:9"}, {}, "start again to go on with the download"),
        ("nowhere", {}, {}, "no such file or directory, and no model of a hub"),
        ("~nobody-here/x", {}, {}, "no such file or directory, and no model of a hub"),
        ("./nowhere", {}, {}, "no such file or directory, and no model of a hub"),
        ("org/small", {}, {"model.safetensors": "cut"}, "not downloaded ("),
        ("org/small", {}, {"model.safetensors": "flipped"}, "model.safetensors: damaged, and removed; start again"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr("time.sleep", lambda _: None)  # between attempts to go on
            for constant, value in (own | constants).items():
                patched.setattr(f"huggingface_hub.constants.{constant}", value)
            with pytest.raises(ConfigError) as failed:
                find_engine(RunOptions(model=name, draft="ngram"))
        assert words in str(failed.value) and "\n" not in str(failed.value) and list_engines() == {}
    hub.faults = {}
    status, text, err = generate("org/small")
    assert status == 0 and all(phase in err for phase in ("downloading org/small: ", "building", "profiling")), err
    assert generate("org/small") == (0, text, "")
    with monkeypatch.context() as patched:
        for constant, value in own.items():
            patched.setattr(f"huggingface_hub.constants.{constant}", value)
        with LLM("org/small", draft="ngram", num_threads=1) as llm:
            assert list(list_engines()) == [llm.engine_dir.name], "the same engine"
    num_requests = hub.num_requests
    assert generate("org/small@main", HF_HUB_OFFLINE="1") == (0, text, "") and hub.num_requests == num_requests
    assert list(list_engines().values()) == ["0 MB, org/small@main"]
    server.shutdown()


def test_the_key_follows_the_checkpoints_and_what_is_damaged_or_interrupted_is_no_engine(pair, tmp_path, monkeypatch):
    own, phases = Path(shutil.copytree(pair, tmp_path / "own")), list[str]()
    config = own / "draft" / "config.json"
    with monkeypatch.context() as patched:
        patched.setattr("faser_backend.engines.build.write_tokenizer", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            demo_engine_dir(pair=own)
    assert not [*tmp_path.glob("engines/demo-*/*")] and not [*tmp_path.glob("**/manifest.json")]
    with reporting_to(phases.append):
        first, _ = demo_engine_dir(pair=own), os.utime(config)
        assert phases and all(each.startswith("building") for each in phases), "hashed before"
        phases.clear()
        assert demo_engine_dir(pair=own) == demo_engine_dir(pair=own) == first and phases == [
            f"hashing {config.parent}"
        ]
    (first / "manifest.json").write_text("{}")
    killed = first.with_name(f".{first.name}.killed.partial")  # what a build that was killed leaves behind
    killed.mkdir()
    assert demo_engine_dir(pair=own) == first and not killed.exists()
    alone = partial(cached_engine, local_source("demo", own / "target"), None, is_profiled=False)
    assert first != alone() == alone(dtype="fp32") != alone("torch") == alone("torch", dtype="bf16")
    config.write_text(config.read_text() + "\n")
    assert demo_engine_dir(pair=own) != first
    config.unlink()
    with pytest.raises(ConfigError, match=r"config\.json: the demo pair is missing"):
        demo_engine_dir(pair=own)


def test_names_of_disks_drafts_and_the_cache_of_the_command_line(run, pair: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_source, "PROFILE_S", 1)
    found = find_engine(RunOptions(model=f"{pair}/target", draft=f"{pair}/draft"))
    engine, draft = found["engine_dir"], pair / "draft"
    assert found["draft"] == "auto" and (engine / "draft.safetensors").is_file() and (engine / "profile.json").is_file()
    assert find_engine(RunOptions(model=str(engine), draft="ngram")) == {"engine_dir": engine, "draft": "ngram"}
    assert "an engine is built already; name a checkpoint" in run("serve", engine, "--draft", draft)[2]
    assert "MODEL = 'x' is given too" in run("serve", "x", "--engine-dir", engine)[2]
    for at in ((engine,), ("--engine-dir", engine), ()):
        assert "--weights = 'int8': an engine is built already" in run("serve", *at, "--weights", "int8")[2]
    assert run("cache", "list")[:2] == (0, f"{engine.name}  0 MB, {pair}/target with draft {draft}\n")
    assert "error: other: no such engine" in run("cache", "remove", "other")[2]
    killed, running = engine.with_name(".small.1.partial"), engine.with_name(".big.1.partial")
    killed.mkdir(), running.mkdir()
    with engine.with_name("big.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "error: big: not removed: another process" in run("cache", "remove", "all")[2]
        assert running.exists() and not killed.exists() and not engine.exists()
    engine.mkdir()
    (engine / "built_from.json").touch()  # cut by a full disk
    assert run("cache", "list")[:2] == (0, f"{engine.name}  0 MB, checkpoints unknown\n")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        assert run("cache", "remove", "all")[:2] == (0, "") and list_engines() == {} and not running.exists()

    monkeypatch.setattr(model_source, "_ensure_profile", lambda *_: None)

    def served(*options: object) -> EngineManifest:
        """Returns what the server would be given."""
        monkeypatch.setattr(
            "faser_backend.triton.launch.serve_until_signalled", lambda _, given, **__: found.append(given)
        )
        found = list[dict[str, str]]()
        assert run("serve", pair / "target", "--draft", "ngram", *options)[0] == 0
        return EngineManifest.load(Path(found[0]["gpt_model_path"]))

    plain, small = served(), served("--weights", "int8", "--max-context", 64)
    assert (plain.target.weight_format.formats[0], plain.target.spec.max_context) == ("fp32", MAX_CONTEXT)
    assert (small.target.weight_format.formats[0], small.target.spec.max_context) == ("int8", 64)
    assert served("--runtime", "torch", "--dtype", "bf16").runtime == "torch" and len(list_engines()) == 3
    for option, value, words in (
        ("--runtime", "gpu", "runtime = 'gpu': must be one of"),
        ("--dtype", "fp16", "dtype = 'fp16': runtime 'llvm' supports only 'fp32'"),
        ("--max-context", 8, "max_context = 8: "),
    ):
        assert words in run("serve", pair / "target", option, value)[2] and len(list_engines()) == 3
    for options in ({"policy": "odd"}, {"policy": "file:none.py"}, {"max_num_seqs": 0}):  # before anything is built
        flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
        (name,) = options
        assert f"{name} = " in run("serve", pair / "target", "--weights", "int4", *flags)[2]
        with pytest.raises(ConfigError, match=f"{name} = "):
            LLM(pair / "draft", **options)
    assert len(list_engines()) == 3
    monkeypatch.setattr(model_source, "cached_engine", lambda target, draft, runtime: f"{draft.name}, {runtime}")
    known = shutil.copytree(pair / "target", pair / "SmolLM2-135M-Instruct-fp16", dirs_exist_ok=True)
    for device, runtime in ((pair / "none", "llvm"), (pair, "torch")):
        monkeypatch.setattr(model_source, "GPU_DEVICE", device)
        assert find_engine(RunOptions(model=str(known)))["engine_dir"] == f"smollm2-head, {runtime}"
    monkeypatch.setattr(model_source, "cached_engine", lambda target, draft, runtime: draft)
    monkeypatch.setattr(model_source, "data_folder", lambda: pair)  # an installed wheel has no heads
    with reporting_to((told := list[str]()).append):
        assert find_engine(RunOptions(model=str(known)))["engine_dir"] is None
    assert any("models/smollm2-head: a checkout alone has this head" in each for each in told), told


@pytest.mark.parametrize("line", ["{}: {}\n", "{} = {}\n"], ids=["yaml", "toml"])
def test_a_file_gives_options_of_serve_and_the_command_line_wins(run, engine_dir, tmp_path, monkeypatch, line):
    seen = []
    serve = lambda where, parameters, **_: seen.append((where, parameters))  # noqa: E731
    monkeypatch.setattr("faser_backend.triton.launch.serve_until_signalled", serve)
    file = tmp_path / ("serve.yaml" if ":" in line else "serve.toml")
    given = {"model": f'"{engine_dir}"', "http-port": 7, "grpc_port": 8, "openai-port": 6, "prefix-reuse": "false"}
    given |= {"stop-requests": "off" if ":" in line else '"off"', "allow-origin": '["https://a"]'}
    file.write_text("".join(line.format(*each) for each in given.items()))
    assert run("serve", "--config", file, "--http-port", 9)[0] == 0
    where, parameters = seen.pop()
    assert (where.http_port, where.grpc_port, where.metrics_port) == (9, 8, 8002)
    assert parameters["enable_kv_cache_reuse"] == "false" and parameters["stop_requests"] == "off"
    for key, value, words in (
        ("colour", 1, "colour is no option of the command"),
        ("http-port", "[1, 2]", "http-port = [1, 2]: must be one value"),
        ("http-port", "[", str(file)),
        ("http-port", 5000 * "[", f"{file}: nested too deeply"),
    ):
        file.write_text(line.format(key, value))
        status, _, err = run("serve", "--config", file)
        assert status == 1 and words in err.replace("'", "") and err.count("\n") == 1 and not seen
    file.write_text(line.format("http-port", '"x"'))
    for options, words in ((("--config", file), f"'--http-port': 'x' in {file}: "), (("--http-port", "y"), "'y': ")):
        status, _, err = run("serve", *options)
        assert status == 2 and words in err and not seen
