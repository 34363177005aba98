"""The table of load clients: what perf_analyzer, aiperf and sglang write is read as they mean it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.bench.load_clients import AIPERF_SUMMARY, COLUMNS, read_rows, write_inputs, write_report

MAX_TOKENS = 5
MS = 1_000_000  # ns
# Rows in the order of throughput, units of microseconds, and answers that are not escaped: as perf_analyzer has them.
CSV = """Concurrency,Inferences/Second,Response Throughput,p50 latency,p90 latency,p95 latency,p99 latency
4,20.5,60.0,200000,210000,220000,230000
1,10.0,30.0,100000,110000,120000,130000
"""


def experiment(value: int, starts_ms: list[int], window_ms: tuple[int, int]) -> str:
    """Each request is answered 10, 20 and 50 ms after it was sent."""
    requests = ",".join(
        f'{{"timestamp":{start * MS},"request_inputs":{{"text_input":"x"}},'
        f'"response_timestamps":[{",".join(str((start + gap) * MS) for gap in (10, 20, 50))}],'
        f'"response_outputs":[{{"text_output":" "quoted" \\ "}}]}}'
        for start in starts_ms
    )
    window = ",".join(str(moment * MS) for moment in window_ms)
    load = f'{{"experiment":{{"mode":"concurrency","value":{value}}}'
    return f'{load},"requests":[{requests}],"window_boundaries":[{window}]}}'


def write_perf_analyzer(folder: Path) -> None:
    (folder / "perf_analyzer-concurrency.csv").write_text(CSV)
    measured = [experiment(1, [0, 100, 900], (0, 500)), experiment(4, [1000, 1010, 1020, 1030], (1000, 1500))]
    profile = f'{{"experiments":[{",".join(measured)}],"version":"2.50.0"}}'
    (folder / "perf_analyzer-concurrency.json").write_text(profile)


def write_aiperf(folder: Path, name: str, **fields: dict[str, float]) -> None:
    (folder / name).mkdir()
    summary = {
        "request_count": {"avg": 22.0},
        "output_token_throughput": {"avg": 1055.4},
        "time_to_first_token": {"p50": 46.8, "p99": 93.8},
        "inter_token_latency": {"p50": 2.77},
        "request_latency": {"p50": 220.9},
    }
    (folder / name / AIPERF_SUMMARY).write_text(json.dumps(summary | fields))


def write_sglang(folder: Path) -> None:
    figures = {
        "completed": 2,
        "output_throughput": 1161.5,
        "median_ttft_ms": 36.05,
        "p99_ttft_ms": 102.2,
        "median_tpot_ms": 2.7,
        "median_e2e_latency_ms": 208.6,
        "errors": ["", "Bad Request: no", ""],
    }
    loads = [
        {"dataset_name": "custom", "max_concurrency": 4, "request_rate": float("inf")},
        {"dataset_name": "random-ids", "max_concurrency": None, "request_rate": 8.0},
    ]
    (folder / "sglang-results.jsonl").write_text("".join(json.dumps(figures | load) + "\n" for load in loads))


def write_openai_clients(folder: Path) -> None:
    (folder / "sglang_openai-results.jsonl").write_text((folder / "sglang-results.jsonl").read_text().splitlines()[0])
    figures = {
        "time_to_first_token_ms": {"p50": 20.0, "p99": 40.0},
        "inter_token_latency_ms": {"p50": 2.0},
        "request_latency": {"p50": 0.25},  # s
    }
    metrics: dict[str, Any] = {name: {"successful": {"percentiles": values}} for name, values in figures.items()}
    metrics["output_tokens_per_second"] = {"successful": {"mean": 900.0}}
    metrics["request_totals"] = {"successful": 30, "errored": 1, "incomplete": 4}
    for value in (16, 4):
        (folder / f"guidellm-{value}.json").write_text(json.dumps({"benchmarks": [{"metrics": metrics}]}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_perf_analyzer(tmp_path)
    write_aiperf(tmp_path, "aiperf-concurrency-4", error_request_count={"avg": 2.0})
    write_aiperf(tmp_path, "aiperf-request_rate-8")
    write_sglang(tmp_path)
    write_openai_clients(tmp_path)
    (tmp_path / "commands.txt").write_text("perf_analyzer -m ensemble\n")
    return tmp_path


def test_every_client_is_read(folder: Path) -> None:
    rows = read_rows(folder, MAX_TOKENS)
    aiperf = (1055.4, 46.8, 93.8, 2.77, 220.9)
    sglang = (1161.5, 36.05, 102.2, 2.7, 208.6)
    expected = [
        ("perf_analyzer", "1 in flight", 2, 0, 10.0 * MAX_TOKENS, 10.0, 10.0, 10.0, 100.0),
        ("perf_analyzer", "4 in flight", 4, 0, 20.5 * MAX_TOKENS, 10.0, 10.0, 10.0, 200.0),
        ("aiperf", "4 in flight", 22, 2, *aiperf),
        ("aiperf", "8 requests/s", 22, 0, *aiperf),
        ("sglang", "4 in flight", 2, 1, *sglang),
        ("sglang", "8 requests/s, random-ids", 2, 1, *sglang),
        ("sglang_openai", "4 in flight", 2, 1, *sglang),
        ("guidellm", "4 in flight", 30, 1, 900.0, 20.0, 40.0, 2.0, 250.0),
        ("guidellm", "16 in flight", 30, 1, 900.0, 20.0, 40.0, 2.0, 250.0),
    ]
    assert [tuple(row[str(column.key)] for column in COLUMNS) for row in rows] == expected


def test_a_report_of_some_clients_alone(folder: Path, tmp_path: Path) -> None:
    for path in (*folder.glob("sglang*.jsonl"), *folder.glob("guidellm-*.json")):
        path.unlink()
    write_inputs(folder, MAX_TOKENS)
    write_report(tmp_path / "out" / "load_clients", folder, MAX_TOKENS, "bash it --quick", ["aiperf 1.0"])
    text = (tmp_path / "out" / "load_clients.md").read_text()
    assert "| aiperf | 4 in flight | 22 | 2 | 1055 | 46.8 | 93.8 | 2.77 | 221 |" in text
    assert "`bash it --quick`: aiperf 1.0." in text and "perf_analyzer -m ensemble" in text and "| sglang" not in text
    assert 1000 < (tmp_path / "out" / "load_clients.png").stat().st_size < 100_000


def test_a_profile_that_lacks_a_load_is_refused(folder: Path) -> None:
    profile = folder / "perf_analyzer-concurrency.json"
    profile.write_text('{"experiments":[' + experiment(1, [0], (0, 500)) + "]}")
    with pytest.raises(ValueError, match=r"perf_analyzer-concurrency\.csv has 2 loads, its profile 1"):
        read_rows(folder, MAX_TOKENS)


def test_inputs_are_the_same_prompts_for_all(tmp_path: Path) -> None:
    write_inputs(tmp_path, MAX_TOKENS)
    theirs = [json.loads(line) for line in (tmp_path / "aiperf.jsonl").read_text().splitlines()]
    prompts = [line["text"] for line in theirs]
    assert len(prompts) > 50 and {line["output_length"] for line in theirs} == {MAX_TOKENS}
    perf_analyzer = json.loads((tmp_path / "perf_analyzer.json").read_text())["data"]
    assert [entry["text_input"] for entry in perf_analyzer] == [[prompt] for prompt in prompts]
    sglang = [json.loads(line)["conversations"] for line in (tmp_path / "sglang.jsonl").read_text().splitlines()]
    assert [turns[0]["content"] for turns in sglang] == prompts
