"""The GPU check: its report and parts, the harness around them, and a dry run on the CPU."""

import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.config import EngineConfig
from faser_backend.core.request import Request, Sampling
from faser_backend.engines.build import build_engines
from faser_backend.lab import shapes
from faser_backend.lab.drive import write_all
from faser_backend.lab.environment import parse_gpu, without_paths
from faser_backend.lab.gpu import first_contact, kernels, parity, serve, sms
from faser_backend.lab.gpu.command import PARTS
from faser_backend.lab.gpu.harness import Context, Outcome, Part, Setting, run_parts
from faser_backend.lab.gpu.report import Report, default_path
from faser_backend.lab.gpu.sms import check_split, overlap_of, ranges
from faser_backend.serving.compose import build_engine
from tests.support.serving_pair import write_pair

ROOT = Path(__file__).resolve().parents[2]
torch.set_num_threads(1)


def tiny(device: str = "cpu") -> Context:
    return Context(device, is_tiny=True, end_s=time.monotonic() + 60)


def gpu_check(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/gpu_check.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# -- the command -----------------------------------------------------------------------------------------------------
def test_every_part_names_a_function_of_its_own():
    assert len({part.name for part in PARTS}) == len({part.run for part in PARTS}) == len(PARTS)
    for part in PARTS:
        module, _, function = part.run.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_a_dry_run_on_the_cpu_ends_every_part_well_and_can_be_shown_again(tmp_path: Path):
    parts, output = "kernels,sms", tmp_path / "found.json"
    done = gpu_check("--device", "cpu", "--tiny", "--budget-s", 600, "--parts", parts, "--output", output)
    assert done.returncode == 0, done.stderr
    content = json.loads(output.read_text())
    status = {name: part["status"] for name, part in content["parts"].items()}
    assert status == {name: "skipped" if name == "sms" else "done" for name in parts.split(",")}
    assert all(case["is_right"] for case in content["parts"]["kernels"]["result"]["cases"])
    assert gpu_check("--table", output).stdout == done.stdout
    assert "--parts = 'nonsense': unknown; known are device" in gpu_check("--parts", "kernels,nonsense").stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so_and_writes_nothing_and_parts_fail(tmp_path: Path):
    done = gpu_check("--parts", "sms", "--tiny", "--output", tmp_path / "found.json")
    assert (done.returncode, done.stdout, done.stderr.count("\n"), [*tmp_path.iterdir()]) == (1, "", 1, [])
    assert done.stderr.startswith("no GPU: ")
    for part in (parity.torch_runtime, serve.run, first_contact.run, sms.run):
        with pytest.raises(RuntimeError, match=r"device = 'cuda': torch .* would compute on 'cpu'|sees no GPU"):
            part(tiny("cuda"))


def test_a_report_is_whole_after_every_part_and_names_no_place(tmp_path: Path):
    report = Report(tmp_path / "found.json", {"device": "cpu"})
    for name in ("first", "second"):
        error = 'File "' + "/" + 'home/somebody/torch/nn.py", line 3, in f at 8/124 GB/s'
        report.record(name, Outcome("title", "failed", error=error))
        content = json.loads(report.path.read_text())
        assert list(content["parts"])[-1] == name
        assert content["parts"][name]["error"] == 'File "nn.py", line 3, in f at 8/124 GB/s'
    assert without_paths("8/124 and a/b and 3 / 4") == "8/124 and a/b and 3 / 4"
    path = default_path({"device": "NVIDIA H100 80GB HBM3", "date": "2026-01-01T"})
    assert path.stem == "gpu-h100-80gb-hbm3-2026-01-01"
    assert parse_gpu("NVIDIA H100, 580.1, 81559 MiB, 345 MHz")["clocks.sm"] == "345 MHz"


# -- the harness -----------------------------------------------------------------------------------------------------
def outcomes_of(*names: str, budget_s: float = 60.0, needs_gpu: bool = False) -> dict[str, Outcome]:
    """Returns the outcomes of gpu_check_parts' functions as parts, of which one that hangs is given little time."""
    outcomes: dict[str, Outcome] = {}
    parts = [Part(n, n, f"tests.support.gpu_check_parts:{n}", 8.0 if n == "hangs" else 30.0, needs_gpu) for n in names]
    run_parts(parts, Setting("cpu", is_tiny=True), budget_s, budget_s / 60, outcomes.__setitem__)
    return outcomes


def test_what_a_part_does_is_recorded_and_the_next_runs_in_a_child_of_its_own():
    fates = {
        "finds_errors": ("failed", {"cases": [{"is_right": True}, {"is_right": False}, {}]}, "{'is_right': False}"),
        "raises": ("failed", {"known": 1}, "ValueError: as it had to"),
        "hangs": ("timed out", {"known": 2}, "killed"),
        "dies": ("died", {}, "SIGKILL"),
        "prints": ("done", {"printed": True}, ""),
        "holds_no_json": ("failed", {}, "item"),
    }
    outcomes = outcomes_of(*fates, "well")
    for name, (status, result, error) in fates.items():
        assert (outcomes[name].status, outcomes[name].result) == (status, result) and error in outcomes[name].error
    assert outcomes["well"].status == "done" and outcomes["well"].result["process"] != os.getpid()


def test_parts_past_the_budget_or_without_a_gpu_are_skipped():
    assert "out of budget" in outcomes_of("well", budget_s=0.0)["well"].error
    assert outcomes_of("well", needs_gpu=True)["well"].error == "needs a GPU"


# -- the parts -------------------------------------------------------------------------------------------------------
def test_splits_of_sms_are_judged():
    assert ranges({3, 1, 2, 16}) == "1-3, 16" and ranges({-1}) == "-1"
    assert all(check_split({0, 1}, {2, 3, 4}, 2, 3).values())
    assert not check_split({0, 1, 2}, {2, 3}, 3, 2)["is_disjoint"]
    assert not check_split({0, 1, 2}, {3}, 2, 1)["is_draft_within_size"]
    assert not check_split({0}, {2, 3}, 2, 2)["is_draft_full"]
    assert overlap_of((0.0, 4.0), (3.0, 13.0)) == 0.25 and overlap_of((0.0, 4.0), (5.0, 9.0)) == 0.0


def test_the_parts_of_tensorrt_end_with_a_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Weights of runtime llvm replace engines, which need a GPU, and a pair whose kernels are compiled anyway."""

    def build(*places, **options):
        return build_engines(*places, exit_layers=options["exit_layers"], weights="fp32", draft_weights="fp32")

    monkeypatch.setattr(parity, "build_engines", build)
    monkeypatch.setattr(parity, "DEMO_PAIR", write_pair(tmp_path, num_layers=6))
    found = parity.rtx_runtime(tiny())
    pair, head = found["dtypes"]
    assert [(row["stage"], row["is_right"]) for row in found["dtypes"]] == [("done", True)] * 2
    assert [row["options"] for row in found["dtypes"]] == ["", "--draft HEAD"]
    for each in (pair, head):
        assert [(row["policy"], row["temperature"]) for row in each["answers"]] == list(parity.RUNS)
        assert all(row["num_equal"] == row["num_answers"] == 2 for row in each["answers"])
    assert pair["target"]["num_different"] == pair["draft"]["num_different"] == head["target"]["num_different"] == 0


def test_a_wrong_kernel_and_one_that_leaves_rows_unwritten_are_found(monkeypatch: pytest.MonkeyPatch):
    right = kernels.exit_scores
    monkeypatch.setattr(kernels, "exit_scores", lambda *tensors: (right(*tensors), tensors[-1].mul_(1.1)))
    monkeypatch.setattr(kernels, "gated_silu", lambda gate_up, out: None)
    found = kernels.correctness(tiny())
    assert {case["kernel"] for case in found["cases"] if not case["is_right"]} == {"exit_scores", "gated_silu"}


def test_planted_drafts_are_right_with_the_planted_probability(tmp_path: Path):
    spec = replace(shapes.TINY_PAIR.target, hidden_size=256, head_dim=8)
    for name, share_wrong in (("target", 0.0), ("draft", 0.25)):
        serve.write_planted(tmp_path / name, spec, share_wrong, torch.device("cpu"), 3)
    exact = {"weights": "fp32", "draft_weights": "fp32", "kv_cache_dtype": "fp32"}
    build_engines(tmp_path / "target", tmp_path / "draft", tmp_path / "engine", **exact)
    with closing(build_engine(tmp_path / "engine", EngineConfig.from_options(policy="fixed:1"))) as engine:
        write_all(engine, [Request("a", np.array([7]), 180, Sampling())])
        metrics = engine.metrics()
    assert metrics.num_accepted / metrics.num_drafted == pytest.approx(0.75, abs=0.1)
