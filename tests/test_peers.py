"""`python -m lab.peers`: its command line, the record, the page, and how peers are asked; the peers are stand-ins."""

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
from lab.peers import contestants, files, vllm
from lab.peers.contestants import PIECES, Piece, Setting
from lab.peers.files import ModelFiles
from lab.peers.measuring import KEPT, Measuring, Record, Sizing
from lab.peers.picture import bars, draw
from lab.peers.report import duels, page
from lab.peers.worker import WorkerPeer
from lab.places import DEMO
from lab.prompts import Prompt
from tests.family_models import random_model
from tests.gguf_models import write_gguf

META = {
    "device": "a CPU", "num_cores": 2, "load_average": [0.5, 0, 0], "date": "today", "commit": "abc", "seed": 0,
    "python": "3.11", "versions": {"numpy": "1"}, "command": "python -m lab.peers", "asked": "questions",
    "model": "M", "weights": "fp16", "threads": 2, "num_jobs": 16, "note": "A peer.", "left_out": [],
    "is_profiled": True,
}  # fmt: skip


def row(policy: str, *speeds: float, different: int = 0) -> dict[str, Any]:
    figures = dict.fromkeys(KEPT, 1.0)
    ends = {"tokens_per_s_min": min(speeds), "tokens_per_s_max": max(speeds), "tokens_per_s_repeats": list(speeds)}
    own = {"policy": policy, "repeats": len(speeds), "num_different": different, "tokens_per_s": sorted(speeds)[1]}
    return figures | own | ends


def record_of(path: Path, theirs: float, **meta: Any) -> Record:
    record = Record(path)
    ours = [row("ours", 90, 100, 110), row("ours, n-grams", 99, 120, 121)]
    rows = [*ours, row("llama.cpp", theirs - 1, theirs, theirs + 1)]
    for load in ((0.0, 1), (0.0, 4), (0.8, 1)):
        record.add("llama", load, META | meta, rows)
    return record


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--only", "llama,tgi"], "error: --only = 'tgi': unknown; known are llama, llama-int8"),
        (["--llama-ngrams", "best"], "error: --llama-ngrams = 'best': must be one of simple, "),
        (["--jobs", "0"], "error: --jobs = 0: must be at least 1"),
        (["--prompts", "nowhere.jsonl"], "error: prompts nowhere.jsonl: no such file"),
        (["--report"], "nothing was measured yet"),
    ],
)
def test_a_bad_command_line_is_told_in_one_line(tmp_path: Path, given: list[str], message: str):
    with pytest.raises(SystemExit) as told:
        command.main([*given, "--output", str(tmp_path)])
    assert message in str(told.value) and "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == []


def test_every_peer_takes_part_unless_some_are_named():
    assert command.parse([]).only == [name for name in PIECES if name != "llama-modes"]
    assert command.parse(["--only", "vllm,llama-modes"]).only == ["vllm", "llama-modes"]


def test_a_load_that_is_measured_again_takes_its_old_ones_place(tmp_path: Path):
    path = tmp_path / "peers.json"
    record_of(path, 80).missing["vllm"] = "not installed"
    record = Record.load(path)
    record.add("llama", (0.0, 4), META, [row("ours", 1, 2, 3), row("llama.cpp", 4, 5, 6)])
    loads = Record.load(path).pieces["llama"]["loads"]
    assert [(each["temperature"], each["num_clients"], len(each["rows"])) for each in loads] == [
        (0.0, 1, 3), (0.0, 4, 2), (0.8, 1, 3),
    ]  # fmt: skip
    record.missing["vllm"] = "not installed"
    record.add("vllm", (0.0, 4), META, [row("ours", 1, 2, 3), row("vLLM", 4, 5, 6)])
    assert Record.load(path).missing == {}
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"no record of lab\.peers"):
        Record.load(path)


def test_the_page_says_first_where_we_lose(tmp_path: Path):
    record = record_of(tmp_path / "lost.json", 200, left_out=["greedy with 16", "greedy with 4"], weights="int8")
    record.missing["vllm"] = "not installed: bash scripts/peers/install.sh vllm"
    text = page(record)
    losing, winning = text.split("## Where ours is as fast or faster")
    # Repeat by repeat 99 / 199, 120 / 200 and 121 / 201: the best of ours, not the plain one.
    assert losing.count("| greedy | 1 | llama.cpp | int8 | 200 | 120 | `ours, n-grams` | 0.60x | 0.50 to 0.60 |") == 1
    assert "At no load that was measured." in winning.split("##")[0]
    assert "- vLLM for CPUs (`vllm`): not installed: bash scripts/peers/install.sh vllm" in winning
    assert "No time was left for: greedy with 16." in winning
    won = page(record_of(tmp_path / "won.json", 100))
    losing, winning = won.split("## Where ours is as fast or faster")
    assert "At no load that was measured." in losing and "| 1.20x |" in winning
    assert [each["ratio"] for each in duels(record)] == sorted(each["ratio"] for each in duels(record))


def test_answers_that_differ_are_counted_under_greedy_alone(tmp_path: Path):
    record = Record(tmp_path / "peers.json")
    for temperature in (0.0, 0.8):
        record.add("llama", (temperature, 1), META, [row("ours", 1, 2, 3), row("llama.cpp", 1, 2, 3, different=7)])
    greedy, sampled = page(record).split("## llama.cpp, fp16 weights")[1].split("T = 0.8:")
    assert "`llama.cpp`" in greedy and greedy.rstrip().endswith("| 7 |") and sampled.rstrip().endswith("|  |")


def test_the_picture_draws_greedy_bars_ours_first(tmp_path: Path):
    record = record_of(tmp_path / "peers.json", 80)
    record.add("openvino", (0.0, 1), META, [row("ours", 1, 2, 3), row("OpenVINO", 4, 5, 6)])
    found = bars(record)
    assert list(found) == ["ours", "ours, n-grams", "llama.cpp", "OpenVINO"]
    assert {count: each["tokens_per_s"] for count, each in found["ours"].items()} == {1: 100, 4: 100}
    assert [path.name for path in draw(record, tmp_path / "peers")] == ["peers_light.png", "peers_dark.png"]
    assert draw(Record(tmp_path / "none.json"), tmp_path / "none") == []


def job(temperature: float = 0.0, *ids: int) -> Job:
    return Job("text", 4, temperature, 9, "", ids or (5, 6, 7), True)


def test_a_peer_that_speaks_openai_is_asked_with_token_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm, "PYTHON", sys.executable)
    monkeypatch.setattr(vllm, "MODULE", "tests.openai_peer")
    room: dict[str, Any] = {"num_slots": 2, "slot_context": 64, "threads": 1, "log": tmp_path / "log"}
    server = vllm.VllmServer(tmp_path, {"method": "ngram"}, dtype="float16", **room)
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
    return Piece("P", "fp16", lambda stack, setting: runs, lambda: "", lambda: "", **fields)


def test_a_piece_takes_turns_over_its_loads_within_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(contestants, "ours", lambda stack, setting: {})
    setting = Setting(ModelFiles("M", {}, tmp_path, {}), "fp16", tmp_path, 1, 4, 64)
    piece = fake_piece({"ours": 100.0, "alone": 50.0, "peer": 200.0}, calls, alone=("alone",))
    loads = ((0.0, 1), (0.0, 4), (0.8, 4))
    record = Record(tmp_path / "peers.json")
    measuring = Measuring(record, Sizing(loads, 2, 3, 4, 0), [Prompt("a"), Prompt("b")])
    assert measuring.piece("llama", piece, setting, META) == []
    first, second, _ = record.pieces["llama"]["loads"]
    assert {each["policy"]: each["tokens_per_s"] for each in first["rows"]} == pytest.approx(
        {"ours": 100.0, "alone": 50.0, "peer": 200.0}
    )
    assert [each["policy"] for each in second["rows"]] == ["ours", "peer"] and second["rows"][1]["num_different"] == 8
    turns = [name for name, count in calls if count == 1]
    assert turns == ["ours", "alone", "peer"] * 2 + ["alone", "peer", "ours"]  # a warm-up, then another one begins
    late = Record(tmp_path / "late.json")
    none = Measuring(late, Sizing(loads, 2, 3, 4, 0, budget_s=-1.0), [Prompt("a")])
    assert none.piece("llama", piece, setting, META) == list(loads) and late.pieces == {}
    lonely = fake_piece({"ours": 1.0, "alone": 1.0}, calls, alone=("alone",))
    assert Measuring(late, Sizing(((0.0, 4),), 1, 3, 4, 0), [Prompt("a")]).piece("llama", lonely, setting, META) == []
    assert late.pieces == {}


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
        assert set(found.names) == set(wanted.names) and found.config == wanted.config
        errors = [float(np.abs(found.read(name) - wanted.read(name)).max()) for name in wanted.names]
        scale = max(float(np.abs(wanted.read(name)).max()) for name in wanted.names)
        assert max(errors) < scale / (1000 if weights == "fp16" else 200)
        assert weights == "fp16" or max(errors) > scale / 1000  # so the formats can be told apart
    files.write_checkpoint(source, tmp_path / "checkpoint")
    stored = SafetensorsFile(tmp_path / "checkpoint" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(stored.read(name), wanted.read(name).astype(np.float16))
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert config["num_hidden_layers"] == wanted.config["num_hidden_layers"]


def test_what_cannot_be_measured_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = ModelFiles("M", {}, tmp_path, {"fp32": tmp_path})
    monkeypatch.setattr(command, "_files", lambda args: model)
    monkeypatch.setattr(command, "asked_prompts", lambda args, folder: SimpleNamespace(prompts=[Prompt("a", "", (1,))]))
    monkeypatch.setitem(PIECES, "vllm", replace(PIECES["vllm"], missing=lambda: "not installed: x"))
    record = Record(tmp_path / "peers.json")
    command.measure(command.parse(["--only", "llama-int8,vllm"]), record)
    assert record.missing == {"llama-int8": "M has no int8 weights", "vllm": "not installed: x"}
    assert Record.load(record.path).missing == record.missing


def test_an_interrupted_measurement_leaves_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def measure(args: object, record: Record) -> None:
        record.add("llama", (0.0, 1), META, [row("ours", 1, 2, 3), row("llama.cpp", 4, 5, 6)])
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", measure)
    assert command.main(["--output", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert "| greedy | 1 | llama.cpp |" in (tmp_path / "peers.md").read_text()
