"""Request traces: read from files, scaled to rates and lengths."""

import numpy as np
import pytest

from faser_backend.core.errors import ConfigError
from faser_backend.lab.traces import Trace, fitted_to, read_trace, with_rate_curve

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
    assert trace.longest == 377 + 47
    assert trace.rate == pytest.approx(1.0)


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


def test_a_missing_file_and_too_few_requests_are_refused(csv, tmp_path):
    with pytest.raises(ConfigError, match="not readable as a trace"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(ConfigError, match=r"requests = 7: .* has only 6"):
        read_trace(csv(), 7)


@pytest.mark.parametrize(("rate", "ratio"), [(0.0, 35.0), (-1.0, 35.0), (5.0, 0.5), (5.0, 2000.0)])
def test_impossible_curves_are_refused(rate, ratio):
    with pytest.raises(ConfigError, match=r"rate = |peak-trough = "):
        with_rate_curve(many(10), rate, ratio, seed=0)


def test_lengths_are_fitted_to_a_context_and_the_report_says_so():
    fitted = fitted_to(many(), 60)
    assert fitted.longest <= 60 and fitted.num_output_tokens.min() >= 1
    assert "lengths scaled by 0.5" in fitted.description
    assert fitted_to(many(), 500).description == "made up"
