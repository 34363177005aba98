"""Spans and log lines of made-up requests; test_operating.py checks those of a real server."""

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from faser_backend.core.errors import ConfigError
from faser_backend.core.request import EngineOutput, FinishReason, RequestStats
from faser_backend.serving.request_reports import (
    MAX_ROUNDS,
    JsonFormatter,
    RequestLife,
    SequenceLife,
    Tracing,
    about,
    check_endpoint,
    log_request,
)
from faser_backend.triton.server import with_own_lines

MS = 1_000_000


def life_of(num_sequences: int = 1, num_rounds: int = 3, **fields: Any) -> RequestLife:
    """Returns a request with two tokens per round, the first 10 ms after its start and the last at its end."""
    life = RequestLife("7-0", 0, model="tiny", ended_ns=100 * MS, **fields)
    for index in range(num_sequences):
        request_id = f"7-0.{index}"
        sequence = life.sequences[request_id] = SequenceLife(request_id, num_prompt_tokens=5, max_tokens=900)
        for number in range(num_rounds):
            sequence.add(EngineOutput(request_id, [1, 2]), (10 + number) * MS)
        stats = RequestStats(1 * MS, 4 * MS, 10 * MS, 90 * MS, num_drafted=8, num_accepted=6, num_preemptions=1)
        sequence.add(EngineOutput(request_id, [3], finish_reason=FinishReason.END_ID, stats=stats), 90 * MS)
    return life


def spans_of(life: RequestLife) -> list[Any]:
    exporter = InMemorySpanExporter()
    tracing = Tracing("http://127.0.0.1:1", processor=SimpleSpanProcessor(exporter))
    tracing.trace(life)
    tracing.close()
    return list(exporter.get_finished_spans())


def test_each_sequence_has_its_phases_and_of_its_rounds_so_many():
    *phases, whole = spans_of(life_of(2))
    assert [span.name for span in phases] == ["queue", "prefill", "decode"] * 2
    assert [(span.end_time - span.start_time) / MS for span in (*phases[:3], whole)] == [3, 6, 80, 100]
    assert [event.attributes["faser.output_tokens"] for event in phases[2].events] == [2, 2, 2, 1]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 14 and whole.attributes["faser.drafted_tokens"] == 16
    assert len(spans_of(life_of(num_rounds=MAX_ROUNDS + 30))[2].events) == MAX_ROUNDS


def test_a_request_that_ended_early_has_the_phases_that_it_had():
    refused = RequestLife("7-1", 0, ended_ns=MS, error="max_tokens = 0: must lie in [1, 9]")
    [span] = spans_of(refused)
    assert not span.status.is_ok and span.status.description == refused.error
    waiting = life_of()
    for sequence in waiting.sequences.values():
        sequence.stats = RequestStats(arrival_ns=1 * MS, first_scheduled_ns=4 * MS)
    assert [span.name for span in spans_of(waiting)] == ["queue", "text_completion tiny"]


def test_the_clients_trace_goes_on_unless_it_makes_no_sense():
    given = {"Traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "max_tokens": 3}
    assert life_of(parameters=given).context == {"traceparent": given["Traceparent"]}
    assert {f"{span.context.trace_id:x}" for span in spans_of(life_of(parameters=given))} == {"a" * 32}
    assert spans_of(life_of(parameters={"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"})) == [], "it is not sampled"
    *_, whole = spans_of(life_of(parameters={"traceparent": "nonsense"}))
    assert whole.parent is None


def test_an_endpoint_that_is_none_and_a_missing_extra_are_told_by_the_option(monkeypatch: pytest.MonkeyPatch):
    for url in ("127.0.0.1:4318", "ftp://x:1", "http://", "http://x:1?a=b", "", "http://[", "http://x:70000"):
        with pytest.raises(ConfigError, match=r"^--otlp-endpoint = .*must be http://HOST:PORT"):
            check_endpoint(url)
    assert check_endpoint("http://127.0.0.1:4318/") == "http://127.0.0.1:4318"
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry: pip install 'faser-backend\[tracing\]'"):
        check_endpoint("http://127.0.0.1:4318")


def test_nothing_of_opentelemetry_is_loaded_unless_it_is_wanted():
    program = (
        "import sys; from faser_backend.triton import frontend; from faser_backend.openai import app; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "[]"


def test_a_line_is_an_object_with_the_id_of_its_request(caplog: pytest.LogCaptureFixture):
    formatter, log = JsonFormatter("ensemble"), logging.getLogger("faser.test")
    caplog.set_level(logging.INFO)
    log_request(RequestLife("7-1", 0, ended_ns=MS, error="no"))
    try:
        raise ValueError("größe\nin two lines")
    except ValueError:
        log.exception("a %s failed", "response", extra=about("7-2"))
    texts = [formatter.format(record) for record in caplog.records]
    assert "".join(texts).isascii(), "a model's stderr is"
    # Triton's line and its end are two writes, and a model's line may come between them.
    log_lines = with_own_lines(f"I1127 loaded{texts[0]}\n".encode()) + with_own_lines(f"{texts[1]}\n".encode())
    triton, *own = log_lines.decode().splitlines()
    assert (triton, own) == ("I1127 loaded", texts)
    failed, error = map(json.loads, texts)
    assert (failed["request_id"], failed["error"], failed["level"]) == ("7-1", "no", "WARNING")
    assert error["message"] == "a response failed" and "größe\nin two lines" in error["traceback"]
    assert (error["request_id"], error["process"]) == ("7-2", "ensemble")
