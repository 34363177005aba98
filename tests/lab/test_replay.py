"""`faser replay` against a real server: its measurements, refusals, an interrupt, wrong options; its traces."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from faser_backend.core.errors import ConfigError
from faser_backend.lab.bench.replay import run_replay
from faser_backend.lab.command_options import ReplayOptions
from faser_backend.lab.prompts import PromptMaker
from faser_backend.lab.traces import Trace, fitted_to, read_trace, scaled, with_rate_curve
from faser_backend.serving.parameters import ServeOptions
from tests.support.serving_pair import CORPUS, MAX_CONTEXT, byte_level_tokenizer
from tests.triton import test_server

server = test_server.server  # a tiny pair behind a real server


def write_trace(path: Path, gap_s: float, lengths: list[tuple[int, int]]) -> Path:
    lines = [f"2023-11-16 18:00:{i * gap_s:010.7f},{prompt},{output}" for i, (prompt, output) in enumerate(lengths)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return path


@pytest.fixture
def options(server: ServeOptions, tmp_path: Path) -> ReplayOptions:
    trace = write_trace(tmp_path / "trace.csv", 0.02, [(20 + i, 5 + i) for i in range(12)])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in CORPUS))
    url = f"127.0.0.1:{server.grpc_port}"
    return ReplayOptions(
        trace=trace, url=url, output=tmp_path / "replay.json", max_context=MAX_CONTEXT, prompts=prompts
    )


def result_of(options: ReplayOptions) -> dict:
    assert options.output is not None
    return json.loads(options.output.read_text())


def test_all_requests_are_answered_with_their_lengths(options: ReplayOptions, capsys):
    assert run_replay(options.model_copy(update={"rate": 40.0})) == 0
    found = result_of(options)
    assert found["num_requests"] == found["num_sent"] == found["num_answered"] == 12
    assert found["errors"] == {} and found["is_whole"]
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(sum(5 + i for i in range(12)))
    assert found["requests_per_s_wanted"] == pytest.approx(40.0)
    assert 0 <= found["lateness_ms_p50"] <= found["lateness_ms_max"]
    assert 0 < found["ttft_ms_p50"] <= found["e2e_ms_p50"] <= found["e2e_ms_p99"]
    assert "12 of 12 sent requests answered" in capsys.readouterr().out


def test_refusals_are_counted_by_kind_and_late_sends_are_told(options: ReplayOptions, tmp_path: Path):
    crowd = write_trace(tmp_path / "crowd.csv", 0.0, [(20, 400)] * 200)  # more than slots and queue hold
    assert run_replay(options.model_copy(update={"trace": crowd})) == 0
    found = result_of(options)
    ((kind, count),) = found["errors"].items()
    assert "maximum queue size" in kind.lower() and count + found["num_answered"] == found["num_sent"] == 200
    assert run_replay(options.model_copy(update={"trace": crowd, "requests": 20, "max_concurrency": 4})) == 0
    found = result_of(options)
    assert found["num_answered"] == 20
    # Four at once: of the ten slower answers six precede the last request, so two of one lane do.
    assert found["lateness_ms_max"] > found["tpot_ms_p50"] * 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 1.0, "scale": 2.0}, "--rate and --scale: give at most one"),
        ({"rate": 0.0}, "--rate = 0.0: must be above 0"),
        ({"max_concurrency": 0}, "--max-concurrency = 0: must be above 0"),
        ({"url": "http://localhost:1"}, "--url = 'http://localhost:1': must be HOST:PORT"),
        ({"requests": 13}, "requests = 13: .* has only 12"),
        ({"tokenizer": Path("nowhere.json")}, "--tokenizer = 'nowhere.json': no such file"),
        ({"url": "127.0.0.1:1"}, r"--url = '127\.0\.0\.1:1': no answer from tensorrt_llm \("),
        ({"prompts": Path("nowhere.jsonl")}, "prompts nowhere.jsonl: missing"),
        ({"output": Path("nowhere/out.json")}, "its directory does not exist"),
    ],
)
def test_bad_options_are_named(options: ReplayOptions, changes, message):
    with pytest.raises(ConfigError, match=message):
        run_replay(options.model_copy(update=changes))


def test_prompts_have_about_the_wanted_lengths_and_differ():
    tokenizer: Tokenizer = byte_level_tokenizer()
    maker = PromptMaker(tokenizer, CORPUS)
    wanted = [1, 7, 40, 200, 200]
    prompts = [maker.prompt(count, index) for index, count in enumerate(wanted)]
    counts = [len(tokenizer.encode(prompt).ids) for prompt in prompts]
    assert np.abs(np.array(counts) - wanted).max() <= 8
    assert len(set(prompts)) == len(prompts)


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
LINES = [f"2023-11-16 18:15:{46 + i}.6805900,{374 + i},{44 + i}\n" for i in range(6)]


@pytest.fixture
def csv(tmp_path):
    def write(text: str = HEADER + "".join(LINES), name: str = "trace.csv"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def many(count: int = 4000) -> Trace:
    return Trace(np.arange(count) * 0.5, np.full(count, 100), np.full(count, 20), "made up")


def test_a_trace_is_read_as_it_is(csv):
    trace = read_trace(csv(), 4)
    assert trace.arrivals_s == pytest.approx([0, 1, 2, 3])
    assert trace.num_prompt_tokens.tolist() == [374, 375, 376, 377]
    assert trace.num_output_tokens.tolist() == [44, 45, 46, 47]
    assert trace.longest == 377 + 47 and trace.rate == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column TIMESTAMP is missing"),
        ("TIMESTAMP,ContextTokens\n", "column GeneratedTokens is missing"),
        (HEADER, "has no requests"),
        (HEADER + "yesterday,1,2\n", "line 2: TIMESTAMP = 'yesterday'"),
        (HEADER + LINES[0] + LINES[1].replace("375", "-3"), "line 3: ContextTokens = '-3': must be a positive"),
        (HEADER + LINES[0].replace(",44", ",0"), "line 2: GeneratedTokens = '0': must be a positive"),
        (HEADER + LINES[0].replace(",44", ""), "line 2: GeneratedTokens = None"),
        (HEADER + LINES[1] + LINES[0], "line 3: TIMESTAMP is earlier"),
    ],
)
def test_a_broken_trace_is_refused_by_line_and_column(csv, text, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(csv(text))


def test_a_missing_file_and_a_rate_of_requests_at_once_are_refused(csv, tmp_path):
    with pytest.raises(ConfigError, match="not readable as a trace"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(ConfigError, match=r"arrivals of trace.csv: all requests come at once"):
        scaled(read_trace(csv(HEADER + 2 * LINES[0])), 5.0)
    assert scaled(alone := read_trace(csv(HEADER + LINES[0])), 5.0) is alone


@pytest.mark.parametrize(("rate", "ratio"), [(0.0, 35.0), (-1.0, 35.0), (5.0, 0.5), (5.0, 2000.0)])
def test_impossible_curves_are_refused(rate, ratio):
    with pytest.raises(ConfigError, match=r"rate = |peak-trough = "):
        with_rate_curve(many(10), rate, ratio, seed=0)


def test_lengths_are_fitted_to_a_context_and_the_report_says_so():
    fitted = fitted_to(many(), 60)
    assert fitted.longest <= 60 and fitted.num_output_tokens.min() >= 1
    assert "lengths scaled by 0.5" in fitted.description
    assert fitted_to(many(), 500).description == "made up"
