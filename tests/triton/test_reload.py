"""Requests of `faser reload` to a fake server, and refusals without one; test_operating.py reloads a real server."""

import copy
import json
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import MagicMock

import pytest

from faser_backend.core.errors import ConfigError, ManifestError
from faser_backend.pipeline.engine import EngineMetrics
from faser_backend.triton.launch import reload_engine
from faser_backend.triton.metrics import MetricReporter
from faser_backend.triton.server import AdminError, Administration
from tests.support.serving_pair import build_pair


class Recorded(Administration):
    """A server that takes every configuration."""

    def __init__(self, served: Path, **parameters: str) -> None:
        super().__init__("127.0.0.1:1", "key")
        texts = {"gpt_model_path": str(served), "policy": "fixed:2", "decoupled_mode": "${decoupled_mode}"} | parameters
        values = {name: {"string_value": text} for name, text in texts.items()}
        self.loaded: list[dict[str, Any]] = [{"name": "tensorrt_llm", "parameters": values}]

    def config(self, model: str) -> dict[str, Any]:
        assert model == "tensorrt_llm"
        return copy.deepcopy(self.loaded[-1])

    def load(self, model: str, config: dict[str, Any], timeout_s: float) -> None:
        self.loaded.append(config)


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> tuple[Path, Path]:
    first, second = (build_pair(tmp_path_factory.mktemp(f"pair{seed}"), seed=seed) for seed in (0, 1))
    return first, second


def test_all_but_the_directory_stays_as_it_was(engines: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    admin = Recorded(engines[0])
    monkeypatch.chdir(engines[1].parent)
    assert reload_engine(admin, Path(engines[1].name), 1.0) == engines[0]
    before, after = (config["parameters"] for config in admin.loaded)
    before["gpt_model_path"] = {"string_value": str(engines[1].resolve())}
    assert after == before | {"loaded_at": after["loaded_at"]}


def test_a_directory_that_was_rebuilt_in_place_is_loaded_again(engines: tuple[Path, Path]):
    admin = Recorded(engines[0])
    for _ in range(2):
        reload_engine(admin, engines[0], 1.0)
    assert len({json.dumps(config) for config in admin.loaded}) == 3, "Triton takes no notice of what it has already"


def test_what_cannot_take_the_others_place_is_not_asked_for(engines: tuple[Path, Path], tmp_path: Path):
    admin = Recorded(engines[0])
    with pytest.raises(ManifestError, match="build engines into this directory first"):
        reload_engine(admin, tmp_path, 1.0)
    fields = json.loads((engines[0] / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**fields, "vocab_hash": "f" * 64}))
    other = Recorded(tmp_path)
    with pytest.raises(ConfigError, match=r"^--engine-dir = .*: vocabulary [0-9a-f]{12} differs from .*, f{12};"):
        reload_engine(other, engines[1], 1.0)
    with pytest.raises(ConfigError, match="early_exit = 'on': an exit scores the candidates of a draft model"):
        reload_engine(Recorded(engines[0], early_exit="on", draft="ngram"), engines[1], 1.0)
    assert len(admin.loaded) == len(other.loaded) == 1


def test_a_replaced_engine_leaves_the_gauges_to_the_new_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("faser_backend.triton.metrics.REFRESH_S", 0.0)
    values: dict[tuple[str, ...], float] = {}

    class Family:
        GAUGE = COUNTER = HISTOGRAM = 0

        def __init__(self, name: str, **_: Any) -> None:
            self.name = name

        def Metric(self, labels: dict[str, str], **_: Any) -> MagicMock:
            return MagicMock(set=partial(values.__setitem__, (self.name, *labels.values())))

    old, new = (MetricReporter(MagicMock(MetricFamily=Family), "m", "1") for _ in range(2))
    new.report(EngineMetrics(num_blocks=3))
    old.report(EngineMetrics(num_blocks=9))
    old.is_replaced = True
    for reporter, num_blocks in ((new, 3), (old, 9)):
        reporter.report(EngineMetrics(num_blocks=num_blocks))
        reporter.close()
    assert values["nv_trt_llm_kv_cache_block_metrics", "m", "1", "max"] == 3


def test_what_a_server_says_becomes_one_line():
    raised = "load failed for model 'tensorrt_llm': version 1 is at UNAVAILABLE state: Internal: TritonModelException: "
    answers = {
        raised + "x = 3: too little\n\nAt:\n  /a/b.py(203): initialize\n;\n": "x = 3: too little",
        "explicit model load / unload is not allowed": "explicit model load / unload is not allowed",
    }
    for answer, told in answers.items():

        class Handler(BaseHTTPRequestHandler):
            text = answer

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                body = json.dumps({"error": self.text}).encode()
                self.send_response(400)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"<html>")

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            admin = Administration(f"127.0.0.1:{server.server_port}", "key")
            thread = Thread(daemon=True, target=lambda server=server: [server.handle_request() for _ in range(2)])
            thread.start()
            with pytest.raises(AdminError, match="Triton's HTTP port does not answer"):
                admin.config("tensorrt_llm")
            with pytest.raises(AdminError) as error:
                admin.load("tensorrt_llm", {}, 10.0)
            thread.join()
        assert str(error.value) == told
    with pytest.raises(AdminError, match=r"^127.0.0.1:1: Triton's HTTP port does not answer \("):
        Administration("127.0.0.1:1", "key").config("tensorrt_llm")
