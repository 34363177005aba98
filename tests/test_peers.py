"""`python -m lab.peers`: its command line, its layouts, and how peers are asked; the peers are stand-ins."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from tokenizers import Tokenizer

from engines.gguf_checkpoint import GGUFCheckpoint
from engines.safetensors_file import SafetensorsFile
from lab.answers import Answer, Job
from lab.peers import __main__ as command
from lab.peers import files, programs
from lab.peers.files import ModelFiles
from lab.peers.pieces import PIECES, Piece
from lab.peers.programs import WorkerPeer
from lab.places import DEMO
from lab.prompts import Prompt
from tests.family_models import random_model
from tests.gguf_models import write_gguf


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--only", "llama,tgi"], "error: --only = 'tgi': unknown; known are llama, llama-int8"),
        (["--jobs", "0"], "error: --jobs = 0: must be at least 1"),
        (["--prompts", "nowhere.jsonl"], "error: prompts nowhere.jsonl: no such file"),
    ],
)
def test_a_bad_command_line_is_told_in_one_line(tmp_path: Path, given: list[str], message: str):
    with pytest.raises(SystemExit) as told:
        command.main([*given, "--output", str(tmp_path)])
    assert message in str(told.value) and "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == []


def job(temperature: float = 0.0, *ids: int) -> Job:
    return Job("text", 4, temperature, 9, "", ids or (5, 6, 7), True)


def test_a_peer_that_speaks_openai_is_asked_with_token_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(programs, "VLLM_PYTHON", sys.executable)
    monkeypatch.setattr(programs, "VLLM_MODULE", "tests.openai_peer")
    room: dict[str, Any] = {"num_slots": 2, "slot_context": 64, "threads": 1, "log": tmp_path / "log"}
    server = programs.VllmServer(tmp_path, {"method": "ngram"}, **room)
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


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_library_answers_from_a_process_of_its_own(tmp_path: Path):
    tokenizer = DEMO / "target" / "tokenizer.json"
    python, log = Path(sys.executable), tmp_path / "log"
    peer = WorkerPeer(python, "tests.echo_worker", [], tokenizer=tokenizer, log=log)
    try:
        deadline = time.monotonic() + 10
        while state(peer.process.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state(peer.process.pid) == "T"  # it has no turn, and takes no core from others
        (first, _), _ = peer.run([job(), job(0.0, 1, 2, 3, 4, 5)], 1)
        assert first.token_ids == [5, 6, 7] and first.num_tokens == len(first.response_s) == 3
        text = Tokenizer.from_file(str(tokenizer)).decode([5, 6, 7])
        assert (peer.version, first.digest) == ("1.0", hashlib.sha256(text.encode()).hexdigest())
    finally:
        peer.stop()
    assert peer.process.poll() is not None
    broken = WorkerPeer(python, "tests.echo_worker", ["broken"], tokenizer=tokenizer, log=log)
    with pytest.raises(RuntimeError, match=r"(?s)the peer ended:.*ValueError: out of order"):
        broken.run([job()], 1)
    broken.stop()


def fake_piece(speeds: dict[str, float], calls: list[tuple[str, int]], **fields: Any) -> Piece:
    """Contestants that answer at once and say how long it took."""

    def runner(name: str, speed: float):
        def run(jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
            calls.append((name, num_clients))
            return [Answer(0.0, [0.1, 0.2], each.max_tokens, 0, 0, name) for each in jobs], 4 * len(jobs) / speed

        return run

    runs = {name: runner(name, speed) for name, speed in speeds.items()}
    return Piece("fp16", lambda stack, setting: runs, lambda: "", lambda: "A peer.", **fields)


def test_pieces_take_turns_and_what_cannot_be_measured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, int]] = []
    model = ModelFiles("M", {}, tmp_path, {"fp16": tmp_path})
    asked = SimpleNamespace(
        prompts=[Prompt("a", "", (1,)), Prompt("b", "", (2,))], name="questions", is_chat=True, left_out="",
        as_dict=dict,
    )  # fmt: skip
    for name, value in (("smollm2", Path), ("model_files", lambda *_: model), ("ours", lambda *_: {})):
        monkeypatch.setattr(command, name, value)
    monkeypatch.setattr(command, "asked_prompts", lambda args, folder: asked)
    speeds = {"ours": 100.0, "alone": 50.0, "peer": 200.0}
    monkeypatch.setitem(PIECES, "llama", fake_piece(speeds, calls, alone=("alone",)))
    monkeypatch.setitem(PIECES, "vllm", replace(PIECES["vllm"], missing=lambda: "not installed: x"))
    counts = ["--clients", "1,4", "--repeats", "2", "--jobs", "3", "--max-tokens", "4", "--profile-s", "0"]
    command.main(["--only", "llama,llama-int8,vllm", *counts, "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert [(row["num_clients"], row["policy"]) for row in rows] == [
        (1, "ours"), (1, "alone"), (1, "peer"), (4, "ours"), (4, "peer"),
    ]  # fmt: skip
    assert {row["policy"]: row["tokens_per_s"] for row in rows[:3]} == pytest.approx(speeds)
    assert rows[2]["ratios"] == [2.0, 2.0] and rows[4]["num_different"] == 8
    turns = [name for name, count in calls if count == 1]
    assert turns == ["ours", "alone", "peer"] * 2 + ["alone", "peer", "ours"]  # a warm-up, then another one begins
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
        files.write_gguf(source, path, weights)
        found = GGUFCheckpoint(path)
        assert {each.tensor_type for each in GGUFReader(path).tensors} == {kind, Type.F32}
        assert set(found.names) == set(wanted.names) and found.fields.values == wanted.fields.values
        errors = [float(np.abs(found.read(name) - wanted.read(name)).max()) for name in wanted.names]
        scale = max(float(np.abs(wanted.read(name)).max()) for name in wanted.names)
        assert max(errors) < scale / (1000 if weights == "fp16" else 200)
        assert weights == "fp16" or max(errors) > scale / 1000  # so the formats can be told apart
    files.write_checkpoint(source, tmp_path / "checkpoint")
    stored = SafetensorsFile(tmp_path / "checkpoint" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(stored.read(name), wanted.read(name).astype(np.float16))
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert config["num_hidden_layers"] == wanted.fields.values["num_hidden_layers"]
