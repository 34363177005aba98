"""`python -m lab.peers`: its command line, its model formats, and its requests; the peers are fakes."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from tokenizers import Tokenizer

from faser_backend.engines.gguf_checkpoint import GGUFCheckpoint
from faser_backend.engines.safetensors_checkpoint import SafetensorsFile
from faser_backend.lab.answers import Answer, Job
from faser_backend.lab.peers import __main__ as peers
from faser_backend.lab.peers import files, programs
from faser_backend.lab.peers.files import ModelFiles
from faser_backend.lab.peers.programs import PIECES, Library, Piece, Setting, Vllm
from faser_backend.lab.places import DEMO
from faser_backend.serving.processes import is_stopped
from faser_backend.text.prompts import Prompt
from tests.support.gguf_models import write_gguf
from tests.support.tiny_models import random_model


@pytest.mark.parametrize("given", [["--only", "llama,tgi"], ["--jobs", "0"], ["--prompts", "nowhere.jsonl"]])
def test_a_bad_command_line_is_one_error(tmp_path: Path, given: list[str]):
    with pytest.raises(SystemExit, match=f"^error: .*{given[1].rpartition(',')[2]}.*$"):
        peers.main([*given, "--output", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def job(temperature: float = 0.0, *ids: int) -> Job:
    return Job("text", 4, temperature, 9, "", ids or (5, 6, 7), True)


def test_a_peer_that_speaks_openai_is_asked_with_token_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(programs, "VLLM_PYTHON", sys.executable)
    monkeypatch.setattr(programs, "VLLM_MODULE", "tests.support.openai_peer")
    server = Vllm(Setting(ModelFiles("M", {}, tmp_path, {}), "fp16", tmp_path, 1, 2, 64), "vLLM", ())
    try:
        answers, seconds = server.run([job(), job(0.8), job(0.0, 1)], 2)
        assert [answer.num_tokens for answer in answers] == [4, 4, 4] and seconds > 0
        assert all(len(answer.response_s) == 4 for answer in answers)
        wanted = [f"{count} ids, T={temperature:g}, 9, end" for count, temperature in ((3, 0), (3, 0.8), (1, 0))]
        assert [answer.digest for answer in answers] == [hashlib.sha256(text.encode()).hexdigest() for text in wanted]
        monkeypatch.setattr(server, "body", lambda job: {"prompt": job.prompt})
        with pytest.raises(RuntimeError, match="400: no token ids"):
            server.run([job()], 1)
    finally:
        server.stop()
    assert server.process.poll() is not None


def test_a_library_answers_from_a_process_of_its_own(tmp_path: Path):
    tokenizer = DEMO / "target" / "tokenizer.json"
    command, log = [sys.executable, "-m", "tests.support.echo_worker"], tmp_path / "log"
    peer = Library(command, tokenizer, log)
    try:
        deadline = time.monotonic() + 10
        while not is_stopped(peer.process.pid):  # halted, it takes no core from others
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (first, _), _ = peer.run([job(), job(0.0, 1, 2, 3, 4, 5)], 1)
        assert first.token_ids == [5, 6, 7] and first.num_tokens == len(first.response_s) == 3
        text = Tokenizer.from_file(str(tokenizer)).decode([5, 6, 7])
        assert (peer.version, first.digest) == ("1.0", hashlib.sha256(text.encode()).hexdigest())
    finally:
        peer.stop()
    assert peer.process.poll() is not None
    broken = Library([*command, "broken"], tokenizer, log)
    with pytest.raises(RuntimeError, match=r"(?s)the peer ended:.*ValueError: out of order"):
        broken.run([job()], 1)
    broken.stop()


class FakePeer:
    """A peer that answers at once and reports its time: tokens/s by name."""

    calls: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, _: Setting | None, name: str, options: Sequence[str]) -> None:
        if len(options) == 1 and name == "repacked":
            raise RuntimeError("ended at once")
        self._name, self._speed = name, float(options[0])

    def run(self, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        self.calls.append((self._name, num_clients))
        answers = [Answer(0.0, [0.1, 0.2], each.max_tokens, 0, 0, self._name) for each in jobs]
        return answers, 4 * len(jobs) / self._speed

    def stop(self) -> None:
        pass


def test_pieces_take_turns_and_what_cannot_be_measured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = ModelFiles("M", {}, tmp_path, {"fp16": tmp_path})
    prompts = [Prompt("a", "", (1,)), Prompt("b", "", (2,))]
    asked = SimpleNamespace(prompts=prompts, name="questions", is_chat=True, left_out="", as_dict=dict)
    ours = FakePeer(None, "ours", ["100"])
    for name, value in (("smollm2", Path), ("model_files", lambda *_: model), ("ours", lambda *_: {"ours": ours.run})):
        monkeypatch.setattr(peers, name, value)
    monkeypatch.setattr(peers, "asked_prompts", lambda args, folder: asked)
    peer = Piece("fp16", FakePeer, {"alone": ["50"]}, tmp_path, "", "A peer.", takes_one=True)
    monkeypatch.setitem(PIECES, "llama", peer)
    monkeypatch.setitem(
        PIECES, "openvino", replace(peer, modes={"repacked": ["200"]}, fallback=("so",), takes_one=False)
    )
    monkeypatch.setitem(PIECES, "vllm", replace(peer, program=tmp_path / "nowhere", installed_by="x"))
    counts = ["--clients", "1,4", "--repeats", "2", "--jobs", "3", "--max-tokens", "4", "--profile-s", "0"]
    peers.main(["--only", "llama,openvino,llama-int8,vllm", *counts, "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert [(row["place"], row["num_clients"], row["policy"]) for row in rows] == [
        ("llama", 1, "ours"), ("llama", 1, "alone"), ("llama", 4, "ours"),
        ("openvino", 1, "ours"), ("openvino", 1, "repacked, so"),
        ("openvino", 4, "ours"), ("openvino", 4, "repacked, so"),
    ]  # fmt: skip
    assert [row["tokens_per_s"] for row in rows[3:5]] == pytest.approx([100, 200])
    assert rows[4]["ratios"] == [2.0, 2.0] and rows[6]["num_different"] == 8
    first = [name for name, count in FakePeer.calls if count == 1][:6]
    assert first == ["ours", "alone"] * 2 + ["alone", "ours"]  # a warm-up, then the order rotates
    page = (tmp_path / "peers.md").read_text()
    assert "- `llama`: fp16 weights. A peer." in page and "- `llama-int8` was not measured: M has no int8" in page
    assert "- `vllm` was not measured: not installed: x" in page


def test_all_layouts_hold_the_numbers_of_one_file(tmp_path: Path):
    source = tmp_path / "model.gguf"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8}
    write_gguf(random_model("llama3_rope", rope_parameters=None, **sizes), source, kind=Type.Q4_1)
    wanted = GGUFCheckpoint(source)
    for weights, kind in (("fp16", Type.F16), ("int8", Type.Q8_0)):
        path = tmp_path / f"{weights}.gguf"
        files.write_gguf(path, source, weights)
        found = GGUFCheckpoint(path)
        assert {each.tensor_type for each in GGUFReader(path).tensors} == {kind, Type.F32}
        assert set(found.names) == set(wanted.names) and found.fields.values == wanted.fields.values
        errors = [float(np.abs(found.read(name) - wanted.read(name)).max()) for name in wanted.names]
        scale = max(float(np.abs(wanted.read(name)).max()) for name in wanted.names)
        assert max(errors) < scale / (1000 if weights == "fp16" else 200)
        assert weights == "fp16" or max(errors) > scale / 1000  # so the formats can be told apart
    files.write_checkpoint(tmp_path / "checkpoint", source)
    stored = SafetensorsFile(tmp_path / "checkpoint" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(stored.read(name), wanted.read(name).astype(np.float16))
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert config["num_hidden_layers"] == wanted.fields.values["num_hidden_layers"]
