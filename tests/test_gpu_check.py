"""The GPU check: its report, goals and pure parts, the harness around its parts, and a dry run on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from engines.build import build_engines
from faser_backend.device.llvm_runner import LlvmRunner
from lab import shapes
from lab.environment import parse_gpu, without_places
from lab.gpu import parity
from lab.gpu.command import PARTS, chosen_parts
from lab.gpu.harness import Harness, Outcome, Part, Setting
from lab.gpu.report import Report, render, slug
from lab.gpu.sms import check_split, common_us, histogram, overlap_of
from lab.gpu.worker import Context

ROOT = Path(__file__).resolve().parents[1]
CPU = Setting("cpu", is_tiny=True)


def test_every_part_names_a_function_of_its_own():
    assert len({part.name for part in PARTS}) == len({part.run for part in PARTS}) == len(PARTS)
    for part in PARTS:
        module, _, function = part.run.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_a_report_is_whole_after_every_part_and_names_no_place(tmp_path):
    report = Report(tmp_path / "found.json", {"device": "cpu"})
    for name in ("first", "second"):
        error = 'File "' + "/" + 'home/somebody/torch/nn.py", line 3, in f at 8/124 GB/s'
        report.record(name, Outcome("title", "failed", error=error))
        content = json.loads(report.path.read_text())
        assert list(content["parts"])[-1] == name
        assert content["parts"][name]["error"] == 'File "nn.py", line 3, in f at 8/124 GB/s'
    assert without_places("8/124 and a/b and 3 / 4") == "8/124 and a/b and 3 / 4"
    assert slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"
    assert parse_gpu("NVIDIA H100, 580.1, 81559 MiB, 345 MHz")["clocks.sm"] == "345 MHz"


def test_the_report_shows_failed_parts_and_what_is_not_installed():
    meta = {
        "device": "cpu",
        "versions": {"torch": "1", "triton": None},
        "missing": ["triton"],
        "date": "2026-01-01",
        "commit": "abc",
        "python": "3",
        "num_cores": 2,
        **asdict(CPU),
    }
    parts = {"parity": asdict(Outcome("title", "failed", error="Traceback\nValueError: why"))}
    text = render({"meta": meta, "parts": parts})
    assert re.search(r"\| parity +\| failed", text) and "ValueError: why" in text
    assert "triton" in re.search(r"Not installed.*", text)[0]


def test_overlap_of_spans():
    assert common_us(np.array([[0.0, 2.0], [4.0, 6.0]]), np.array([[1.0, 5.0]])) == 2.0


def test_histograms_show_shares_that_leak():
    counts = histogram(np.array([3, 3, 1], np.int32))
    assert counts == {"1": 1, "3": 2}
    assert all(check_split({0, 1}, {2, 3, 4}, 2, 3).values())
    assert not check_split({0, 1, 2}, {2, 3}, 3, 2)["is_disjoint"]
    assert not check_split({0, 1, 2}, {3}, 2, 1)["is_draft_within_size"]
    assert not check_split({0}, {2, 3}, 2, 2)["is_draft_full"]
    assert overlap_of(np.array([[0.0, 4.0]]), np.array([[3.0, 13.0]])) == 0.25


def test_the_probe_compiles_and_reads_the_sm_and_the_clock():
    code = (
        "from lab.gpu.sms import sm_probe_kernel as k\n"
        "from plugins.compile import compile_kernel\n"
        "types = {'sms': '*i32', 'starts': '*i64', 'ends': '*i64', 'spin_ns': 'i32'}\n"
        "ptx = compile_kernel(k, types, {}, 90, num_warps=8).ptx\n"
        "assert '%smid' in ptx and '%globaltimer' in ptx"
    )
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_dry_run_on_the_cpu_ends_every_part_well(tmp_path):
    output = tmp_path / "found.json"
    command = [sys.executable, "scripts/gpu_check.py", "--device", "cpu", "--tiny", "--budget-s", "600"]
    parts = "peaks,kernels,bandwidth,sms"
    done = subprocess.run(
        [*command, "--parts", parts, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(output.read_text())
    status = {name: part["status"] for name, part in content["parts"].items()}
    assert status == {name: "skipped" if name == "sms" else "done" for name in parts.split(",")}
    shown = subprocess.run(
        [sys.executable, "scripts/gpu_check.py", "--table", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.stdout == done.stdout


@pytest.mark.parametrize("is_wrong", [True, False])
def test_the_parts_of_tensorrt_end_with_a_head(is_wrong, monkeypatch):
    """Weights of runtime llvm stand in for engines, which need a GPU. Rows of another call are noticed."""

    def build(*places, **options):
        if options.get("runtime") != "tensorrt_rtx":
            return build_engines(*places, **options)
        return build_engines(*places, runtime="llvm", exit_layers=options["exit_layers"], kv_cache_dtype="fp32")

    monkeypatch.setattr(parity, "build_engines", build)
    if is_wrong:
        monkeypatch.setattr(LlvmRunner, "take_rows", lambda self, hidden, kept: hidden[::-1][kept])
    found = parity.rtx_runtime(Context("cpu", is_tiny=True, seed=0, end_s=time.monotonic() + 60))
    pair, head = found["dtypes"]
    assert [row["stage"] for row in found["dtypes"]] == ["done"] * 2
    assert [row["options"] for row in found["dtypes"]] == ["", "--draft HEAD"]
    for each in (pair, head):
        assert [(row["policy"], row["temperature"]) for row in each["answers"]] == list(parity.RUNS)
        assert all(row["num_equal"] == row["num_answers"] == 2 for row in each["answers"])
    assert pair["target"]["num_different"] == pair["draft"]["num_different"] == head["target"]["num_different"] == 0


def test_bytes_by_hand():
    shape = shapes.AttentionShape(2, 32, 1, num_heads=4, num_kv_heads=2, head_dim=8, kv_block_size=16)
    pool, chunk, queries, indices = 2 * 2 * 32 * 2 * 8, 4 * 2 * 2 * 8, 2 * 2 * 4 * 8, 2 * 3 + 5 + 2
    assert shapes.attention_bytes(shape, 2) == 2 * (pool + chunk + queries) + 4 * indices


def test_an_unknown_part_is_refused_by_name():
    with pytest.raises(ValueError, match="--parts = 'nonsense': unknown; known are device"):
        chosen_parts("kernels,nonsense")


# -- the harness ----------------------------------------------------------------------------------------


def run_parts(*names: str, budget_s: float = 60.0, **changes) -> dict[str, Outcome]:
    """Parts of gpu_check_parts by name, with limits of three seconds; the last of their outcomes."""
    outcomes: dict[str, Outcome] = {}
    parts = [Part(name, name, f"tests.gpu_check_parts:{name}", **({"limit_s": 3.0} | changes)) for name in names]
    Harness(CPU, budget_s, 60.0, outcomes.__setitem__).run(parts)
    return outcomes


@pytest.mark.parametrize(
    ("name", "status", "result", "error"),
    [
        ("raises", "failed", {"known": 1}, "ValueError: as it had to"),
        ("hangs", "timed out", {"known": 2}, "killed"),
        ("dies", "died", {}, "SIGKILL"),
        ("prints", "done", {"printed": True}, ""),
        ("holds_no_json", "failed", {}, "item"),
    ],
)
def test_what_a_part_does_is_recorded_and_the_next_runs(name, status, result, error):
    outcomes = run_parts(name, "well")
    assert (outcomes[name].status, outcomes[name].result) == (status, result) and error in outcomes[name].error
    assert outcomes["well"].status == "done" and outcomes["well"].result["earlier"] == [name]


def test_every_part_has_a_child_of_its_own():
    found = []
    part = Part("well", "", "tests.gpu_check_parts:well", 5.0)
    Harness(CPU, 60.0, 60.0, lambda _, outcome: found.append(outcome.result["process"])).run([part, part])
    assert len({*found, os.getpid()}) == 3


def test_parts_past_the_budget_or_without_a_gpu_are_skipped():
    assert "out of budget" in run_parts("well", budget_s=0.0)["well"].error
    assert run_parts("well", needs_gpu=True)["well"].error == "needs a GPU"
