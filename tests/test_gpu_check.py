"""The tables and the pure parts of scripts/gpu_check.py, and a dry run of it on the CPU."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from lab.gpu import byte_model
from lab.gpu.byte_model import AttentionShape
from lab.gpu.economics import (
    chance_whole,
    common_us,
    expected_accepted,
    overlap_share,
    ping_pong_round,
    run_ahead_round,
    serial_round,
)
from lab.gpu.goals import GOALS, judged
from lab.gpu.harness import Outcome, Setting
from lab.gpu.parts import PARTS
from lab.gpu.report import Report, parse_gpu, slug, without_places
from lab.gpu.sections import table
from lab.gpu.sm_part import check_split, histogram, overlap_of
from lab.gpu.table import render

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


def test_names_of_gpus():
    assert slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"
    assert parse_gpu("NVIDIA H100, 580.1, 81559 MiB, 345 MHz")["clocks.sm"] == "345 MHz"


def test_a_table_reads_as_text():
    lines = table(["name", "us"], [["a", 1.23456], ["bc", 1234.5]])
    assert lines == ["| name |   us |", "|------|-----:|", "| a    | 1.23 |", "| bc   | 1234 |"]


def ladder_rows() -> list[dict]:
    base = {"load": "bursty", "plan_share": 0.01, "e2e_ms_p50": 100.0}
    speeds = {"none": 100.0, "fixed:4": 90.0, "goodput": 120.0, "faser": 180.0}
    rows = [base | {"policy": name, "tokens_per_s": speed} for name, speed in speeds.items()]
    rows[-1]["e2e_ms_p50"] = 50.0
    return rows


def test_goals_are_read_from_results():
    results = {
        "bandwidth": {"attention": [{"batch": 32, "context": 1024, "share_of_copy": share} for share in (0.9, 0.7)]},
        "latency": {"latency": [{"batch": 1, "overlap_of_shorter": 0.9}, {"batch": 8, "overlap_of_shorter": 0.75}]},
        "ladder-8b": {"rows": ladder_rows()},
        "kernels": {"cases": [{"is_right": True}, {"is_right": False}]},
        "parity": {
            "dtypes": [
                {
                    "dtype": "fp32",
                    "answers": [{"temperature": 0.0, "num_answers": 8, "num_equal": 6, "num_near_ties": 2}],
                }
            ]
        },
    }
    found = {goal.name: (value, word) for goal, value, word in judged(results)}
    assert len(found) == len(GOALS)
    words = {name.partition(",")[0].partition(" (")[0]: found[name] for name in found}
    assert words["attention"] == (0.7, "missed")
    assert words["draft || target"] == (0.75, "met")
    assert words["kernels that differ from their references"] == (1, "missed")
    assert words["greedy answers that differ"] == (0, "met")
    assert words["SM splits that leak"] == (None, "not measured")
    by_name = {name: value for name, (value, _) in found.items()}
    assert by_name["throughput, faser / fixed:4, bursty (8B pair)"] == 2.0
    assert by_name["median latency, fixed:4 / faser, bursty (8B pair)"] == 2.0
    assert by_name["throughput, faser / best other, bursty (8B pair)"] == 1.5
    assert by_name["throughput, faser / none, worst load of all"] == 1.8


def test_the_report_shows_failed_parts_and_does_not_judge_tiny_runs():
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
    parts = {"latency": asdict(Outcome("title", "failed", error="Traceback\nValueError: why"))}
    text = render({"meta": meta, "parts": parts})
    assert "| latency | failed" in text and "ValueError: why" in text and "Goals" not in text
    assert "triton" in re.search(r"Not installed.*", text)[0]
    assert "Goals" in render({"meta": meta | {"is_tiny": False}, "parts": {}})


def test_bytes_of_attention_by_hand():
    shape = AttentionShape(2, 32, 1, num_heads=4, num_kv_heads=2, head_dim=8, kv_block_size=16)
    pool, chunk, queries, indices = 2 * 2 * 32 * 2 * 8, 4 * 2 * 2 * 8, 2 * 2 * 4 * 8, 2 * 3 + 5 + 2
    assert byte_model.attention_bytes(shape, 2) == 2 * (pool + chunk + queries) + 4 * indices
    assert byte_model.attention_flops(shape) == 4 * 2 * 4 * 8 * (32 + 1)


def test_sizes_of_the_models_are_those_that_their_names_say():
    from lab.gpu.pairs import PAIRS

    billions = {name: byte_model.stored_count(pair.target) / 1e9 for name, pair in PAIRS.items()}
    assert billions["qwen3-8b/0.6b"] == pytest.approx(8.19, abs=0.01)
    assert billions["qwen3-32b/0.6b"] == pytest.approx(32.76, abs=0.01)
    assert byte_model.stored_count(PAIRS["qwen3-8b/0.6b"].draft) / 1e9 == pytest.approx(0.596, abs=0.001)
    assert byte_model.kv_bytes_per_token(PAIRS["qwen3-8b/0.6b"].target, 2) == 36 * 2 * 8 * 128 * 2


def test_a_floor_is_bytes_for_one_row_and_arithmetic_for_many():
    from lab.gpu.pairs import PAIRS

    spec = PAIRS["qwen3-8b/0.6b"].target
    speed = {"bytes_per_s": 3e12, "flops_per_s": 8e14}
    one, many = (byte_model.call_floor_us(spec, rows, 1, 0, 2, **speed) for rows in (1, 4096))
    assert one == pytest.approx(2 * byte_model.weight_count(spec) / 3e12 * 1e6)
    assert many == pytest.approx(2 * 4096 * byte_model.weight_count(spec) / 8e14 * 1e6)


def test_rounds_of_the_formula():
    matches = np.array([[1, 1, 0, 1, 1, 1]], bool)  # windows of 2: 11, 10, 01, 11, 11
    assert expected_accepted(matches, 2) == pytest.approx((2 + 1 + 0 + 2 + 2) / 5)
    assert chance_whole(matches, 2) == pytest.approx(3 / 5)
    assert serial_round(3.0, 5.0, 1.4) == (8.0, 2.4)
    assert run_ahead_round(4.0, 5.0, accepted=1.4, whole=0.75) == (6.0, 1.65)
    assert ping_pong_round(4.0, 5.0, accepted=1.4) == (10.0, 2.4)
    assert serial_round(3.0, 5.0, 1.0).tokens_per_s(4) == pytest.approx(1e6)


def test_overlap_figures():
    from lab.gpu.lent_runtime import overlap_figures

    assert overlap_share(2.0, 6.0, 6.0) == 1.0
    assert overlap_share(2.0, 6.0, 8.0) == 0.0
    assert common_us(np.array([[0.0, 2.0], [4.0, 6.0]]), np.array([[1.0, 5.0]])) == 2.0
    spans = np.array([[[0.0, 10.0], [2.0, 6.0]], [[20.0, 24.0], [30.0, 34.0]]])  # one within the other; apart
    found = overlap_figures(spans)
    assert found == {"num_overlapped": 2, "overlap_of_either": 4 / 18, "overlap_of_shorter": 0.5}
    assert overlap_figures(np.zeros((0, 2, 2)))["num_overlapped"] == 0


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
        "from lab.gpu.sm_probe import sm_probe_kernel as k\n"
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
    parts = "peaks,kernels,bandwidth,sms,latency,ladder-8b"
    done = subprocess.run(
        [*command, "--parts", parts, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(output.read_text())
    status = {name: part["status"] for name, part in content["parts"].items()}
    assert status == {name: "skipped" if name == "sms" else "done" for name in parts.split(",")}
    rows = content["parts"]["ladder-8b"]["result"]["rows"]
    assert content["parts"]["ladder-8b"]["result"]["missing"] == []
    assert {row["load"] for row in rows} == {"3 clients", "1 clients", "bursty"}
    assert all(row["num_different"] == 0 for row in rows), "planted tokens do not depend on the policy"
    assert all(math.isfinite(row["tokens_per_s"]) for row in rows)
    shown = subprocess.run(
        [sys.executable, "scripts/gpu_check.py", "--table", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.stdout == done.stdout


def test_a_sweep_times_every_launch_and_every_split():
    from lab.gpu import sweep_part
    from lab.gpu.worker import Context

    found = sweep_part.run(Context("cpu", is_tiny=True, seed=0, end_s=time.monotonic() + 60))
    (row,) = found["shapes"]
    assert row["launches"][0]["choice"] == str(row["table"]), "the table's own launch is the first"
    assert len(row["launches"]) > 5 and len(row["splits"]) == len(sweep_part.SPLITS)
    assert all(each["us"] > 0 for each in row["launches"] + row["splits"])


def test_an_unknown_part_is_refused_by_name():
    command = [sys.executable, "scripts/gpu_check.py", "--parts", "kernels,nonsense"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--parts = 'nonsense': unknown; known are device" in done.stderr
