"""`lab.checks.compare`: names, equal answers, a row for each on the page. The files of peers hold one model."""

import json
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader

from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.engines.gguf_checkpoint import GGUFCheckpoint
from faser_backend.engines.safetensors_checkpoint import SafetensorsFile
from faser_backend.lab.answers import Answer
from faser_backend.lab.checks import compare
from faser_backend.lab.peers import __main__ as peers
from faser_backend.lab.peers import files
from faser_backend.lab.places import ROOT
from tests.support.gguf_models import write_gguf
from tests.support.tiny_models import random_model


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("clients", "4,0", "0: must be"),
        ("clients", "x", "'x'"),
        ("repeats", "0", "0: must be"),
        ("jobs", "-1", "-1: mu"),
        ("target", "none", "'none': no such file or directory"),
        ("head", "none", "'none': no such file or directory"),
    ],
)
def test_a_number_of_nothing_and_a_missing_file_are_refused(option: str, value: str, reason: str, capsys) -> None:
    for program in (peers,) if value == "none" else (compare, peers):
        with pytest.raises(SystemExit):
            program.main([f"--{option}={value}"])
        error = capsys.readouterr().err
        assert f"argument --{option}: " in error and reason in error


def test_names_say_who_drafts() -> None:
    for name, policy, draft in (("faser", "faser", "auto"), ("fixed:5 (model+ngram)", "fixed:5", "model+ngram")):
        config = compare.config_of(name, max_num_seqs=4)
        assert (config.policy, config.draft, config.max_num_seqs) == (policy, draft, 4)
    with pytest.raises(ConfigError, match=r"'\(ngrams\)' must be one of \(ngram\), \(model\+ngram\)"):
        compare.config_of("fixed:4 (ngrams)")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("the quick\nanother one\n")
    return path


def compared(tmp_path: Path, prompts: Path, *words: str) -> list[dict]:
    common = ["--temperatures", "0", "--repeats", "1", "--max-tokens", "6", "--threads", "1", "--name", "found"]
    with suppress(KeyboardInterrupt):
        compare.main([*words, *common, "--prompts", str(prompts), "--output", str(tmp_path)])
    return json.loads((tmp_path / "found.json").read_text())["rows"]


def test_contestants_take_turns_until_an_interrupt(engine_dir, tmp_path: Path, prompts: Path, capsys, monkeypatch):
    names = ["none", "fixed:3", "fixed:2 (ngram)", "faser (model+ngram)"]
    measures = iter([compare.measure, compare.measure, lambda *_: signal.raise_signal(signal.SIGTERM)])
    monkeypatch.setattr(compare, "measure", lambda *given: next(measures)(*given))  # noqa: PLW0108
    rows = compared(tmp_path, prompts, str(engine_dir), "--clients", "1,2,3", "--policies", ",".join(names))
    assert [(row["num_clients"], row["policy"]) for row in rows] == [(n, name) for n in (1, 2) for name in names]
    assert all(row["num_different"] == 0 for row in rows)
    assert {row["ratios"][0] for row in rows if row["policy"] == "none"} == {1.0}
    assert next(row for row in rows if row["policy"] == "fixed:3")["acceptance_rate"] > 0
    assert "| `faser (model+ngram)` |" in capsys.readouterr().out
    assert all((tmp_path / f"found_{shade}.png").stat().st_size > 1000 for shade in compare.SHADES)


def test_an_engine_is_compared_in_process_and_served(engine_dir: Path, tmp_path: Path, prompts: Path, monkeypatch):
    words = [str(engine_dir), "--places", "process,triton", "--clients", "2", "--policies", "fixed:2"]
    rows = compared(tmp_path, prompts, *words)
    assert [(row["place"], row["policy"]) for row in rows] == [("process", "fixed:2"), ("Triton", "fixed:2")]
    assert all(row["num_different"] == 0 and row["mean_accepted"] > 0 for row in rows)
    for one, other, names in (("a/b", "a/c", "b none,c none"), ("a/b", "c/b", "a/b none,c/b none")):
        assert ",".join(compare.contestants([Path(one), Path(other)], ["none"])) == names

    def serve_all(*given: object) -> None:
        raise FaserError(str(given))

    monkeypatch.setattr(compare, "serve_all", serve_all)
    with pytest.raises(FaserError, match="'--max-num-seqs', '64'"):
        compared(tmp_path, prompts, *words, "--places", "triton", "--clients", "64")


def test_loads_before_the_failure_of_a_peer_are_kept(engine_dir: Path, tmp_path: Path, prompts: Path, monkeypatch):
    def run(jobs: list, clients: int) -> tuple[list[Answer], float]:
        if clients == 2:
            raise RuntimeError("the peer ended")
        return [Answer(0.0, [1.0, 2.0], 2, 0, 0, "") for _ in jobs], 1.0

    made = files.ModelFiles("stub", {}, engine_dir, {"fp16": engine_dir})
    monkeypatch.setattr(peers, "model_files", lambda *_: made)
    monkeypatch.setattr(peers, "started", lambda *_: {"peer": run})
    monkeypatch.setattr(peers, "ours", lambda *_: {"ours": run})
    monkeypatch.setitem(peers.PIECES, "llama", replace(peers.PIECES["llama"], program=prompts))
    words = ["--only", "llama", "--clients", "1,2", "--target", str(prompts), "--prompts", str(prompts)]
    with pytest.raises(SystemExit, match="error: the peer ended"):
        peers.main([*words, "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert [(row["policy"], row["num_clients"]) for row in rows] == [("ours", 1), ("peer", 1)]


def test_an_unknown_way_is_refused(engine_dir: Path) -> None:
    command = [sys.executable, "-m", "lab.checks.equality", "--engine-dir", engine_dir, "--ways", "typo"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "--ways typo: no way's name contains this" in ended.stderr


def test_all_layouts_hold_the_numbers_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    monkeypatch.setattr(files, "_make", lambda path, *_: path.write_text(""))
    monkeypatch.setattr(files, "cached_engine", lambda target, head, *_, **__: Path(f"{target} {head}"))
    made = []
    for text in ("trained", "trained again"):  # other contents under the same names
        (tmp_path / "checkpoint" / "model.safetensors").write_text(text)
        source.write_text(text)
        made.append(files.model_files(source, tmp_path / "checkpoint", tmp_path / "made"))
    first, second = ({each.checkpoint, *each.gguf.values(), *each.heads.values()} for each in made)
    assert not first & second
