"""Operation of a running `faser serve`: traces, logs, another engine directory, a drain that probes see.

One server for all of it; its drain comes last.
"""

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from faser_backend.core.errors import SHUTTING_DOWN
from faser_backend.lab.abuse.served import metric
from faser_backend.lab.checks.servers import free_ports
from faser_backend.triton.metrics import REQUESTS
from faser_backend.triton.server import AdminError, Administration
from tests.support.clients import Answer, Stream, post, wait_for_free_blocks
from tests.support.processes import wait_until
from tests.support.served import Served, serve
from tests.support.serving_pair import build_pair
from tests.triton.test_access import KEY, write_key

PROMPT, LONG = [5, 6, 7], 3900
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector:
    """An OpenTelemetry collector. spans: all received ones, as messages of the protocol."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[Any] = []

    def wait_for(self, is_wanted: Callable[[Any], bool]) -> Any:
        """Returns the first span for which is_wanted is True."""
        return wait_until(lambda: next(filter(is_wanted, list(self.spans)), None), "no such span")

    def children(self, span: Any) -> dict[str, Any]:
        return {each.name: each for each in list(self.spans) if each.parent_span_id == span.span_id}


def attributes_of(span: Any) -> dict[str, Any]:
    """Returns the attributes of a span or an event."""
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            collector.spans += [span for r in sent.resource_spans for s in r.scope_spans for span in s.spans]
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Operated:
    served: Served
    openai: int
    log: Path
    collector: Collector

    def lines(self) -> list[dict[str, Any]]:
        """Log lines of our processes, without Triton's own lines."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith('{"time"')]

    def line(self, **fields: str) -> dict[str, Any]:
        """Waits for the first line of the log with these fields."""
        return wait_until(lambda: next((line for line in self.lines() if fields.items() <= line.items()), None), fields)

    def ask(self, model: str, request_id: str = "", **tensors: Any) -> Answer:
        stream = Stream(f"127.0.0.1:{self.served.grpc_port}")
        try:
            stream.send(model, request_id, **tensors)
            return stream.answer()
        finally:
            stream.close()

    def tokens(self, length: int) -> list[int]:
        given = {"input_ids": PROMPT, "input_lengths": 3, "request_output_len": length, "end_id": -1}
        answer = self.ask("tensorrt_llm", streaming=True, **given)
        assert answer.error is None
        return answer.token_ids

    def text(self, length: int) -> str:
        answer = self.ask("ensemble", text_input="def f(x):\n", max_tokens=length, end_id=-1, stream=True)
        assert answer.error is None
        return answer.text


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> tuple[Path, Path]:
    """Builds two directories with the same vocabulary and different weights."""
    first, second = (build_pair(tmp_path_factory.mktemp(f"pair{seed}"), max_context=4096, seed=seed) for seed in (0, 1))
    return first, second


@pytest.fixture(scope="module")
def key_file(tmp_path_factory) -> Path:
    return write_key(tmp_path_factory.mktemp("key") / "key")


@pytest.fixture(scope="module")
def server(engines: tuple[Path, Path], key_file: Path, tmp_path_factory) -> Iterator[Operated]:
    log, [port] = tmp_path_factory.mktemp("log") / "stderr", free_ports(1)
    options = ["--engine-dir", engines[0], "--num-threads", 1, "--policy", "fixed:2", "--openai-port", port]
    options += ["--admin-key-file", key_file, "--log-format", "json", "--verbose"]
    with collecting() as collector, serve(*options, "--otlp-endpoint", collector.url, log=log) as served:
        yield Operated(served, port, log, collector)


def send(port: int, path: str, body: dict[str, Any], **headers: str) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def check_spans(collector: Collector, num_tokens: int, name: str) -> dict[str, Any]:
    """Asserts the spans of one request of the client's trace; returns the attributes of the first of them."""

    def is_whole(span: Any) -> bool:
        is_ours = span.trace_id.hex() == TRACE and span.parent_span_id.hex() == PARENT
        return is_ours and attributes_of(span).get("gen_ai.usage.output_tokens") == num_tokens

    span = collector.wait_for(is_whole)
    collector.wait_for(lambda each: each.name == "decode" and each.parent_span_id == span.span_id)
    parts = collector.children(span)
    assert set(parts) == {"queue", "prefill", "decode"} and span.name == f"text_completion {name}"
    assert all(part.trace_id == span.trace_id for part in parts.values())
    times = [span.start_time_unix_nano, *(parts[part].start_time_unix_nano for part in ("queue", "prefill", "decode"))]
    times += [parts["decode"].end_time_unix_nano, span.end_time_unix_nano]
    assert times == sorted(times) and abs(times[0] / 1e9 - time.time()) < 60
    rounds = [event for event in parts["decode"].events if event.name == "round"]
    assert sum(attributes_of(event)["faser.output_tokens"] for event in rounds) == num_tokens
    return attributes_of(span)


def test_a_clients_trace_goes_on_through_every_way_in(server: Operated, engines: tuple[Path, Path]):
    body = {"text_input": "def f(x):\n", "max_tokens": 21, "end_id": -1}
    # Triton's `generate` forwards no headers to models, but what else the body holds.
    send(server.served.http_port, "/v2/models/ensemble/generate", {**body, "traceparent": TRACEPARENT})
    found = check_spans(server.collector, 21, engines[0].name)
    assert found["gen_ai.operation.name"] == "text_completion" and found["gen_ai.request.max_tokens"] == 21
    assert found["gen_ai.response.finish_reasons"] == ["length"] and found["gen_ai.usage.input_tokens"] > 3
    assert 0 < found["faser.accepted_tokens"] <= found["faser.drafted_tokens"] and found["faser.verifications"] > 1
    asked = {"prompt": [PROMPT], "max_tokens": 17, "ignore_eos": True}
    send(server.openai, "/v1/completions", asked, traceparent=TRACEPARENT)
    check_spans(server.collector, 17, engines[0].name)


def test_a_refused_request_has_a_span_and_a_line_with_its_error(server: Operated):
    answer = server.ask("ensemble", "refused", text_input="def", max_tokens=-1)
    assert answer.error is not None
    span = server.collector.wait_for(lambda each: attributes_of(each).get("faser.client_id") == "refused")
    assert "max_tokens = -1" in span.status.message and span.status.code == 2
    line = server.line(client_id="refused")
    assert line["level"] == "WARNING" and "max_tokens = -1" in line["error"] and line["process"] == "ensemble"


def test_lines_of_the_log_name_their_requests(server: Operated):
    server.ask("ensemble", "of-a-client", text_input="def f(x):\n", max_tokens=9, end_id=-1)
    line = server.line(client_id="of-a-client")
    assert line["message"] == "request ended" and line["num_output_tokens"] == 9
    assert line["request_id"] and line["duration_ms"] > 0 and line["finish_reasons"] == ["length"]
    assert server.ask("ensemble", "too-long", text_input="def f(x):\n", max_tokens=5000, stop_words="e").error is None
    ended = server.line(client_id="too-long")
    clamped = [each for each in server.lines() if "max_tokens = 5000" in each["message"]]
    assert [each["request_id"] for each in clamped] == [ended["request_id"]]
    started = next(each for each in server.lines() if each["message"].startswith("starting Triton"))
    assert started["process"] == "serve"


def ask_until(is_over: threading.Event, work: Any) -> tuple[threading.Thread, list[tuple[float, float, Any]]]:
    """Starts a thread that repeats a request. Returns it and its answers, each with start and end time."""
    answers: list[tuple[float, float, Any]] = []

    def ask() -> None:
        while not is_over.is_set():
            begin, answer = time.time(), work(LONG)
            answers.append((begin, time.time(), answer))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)  # the threads' requests do not end together
    return thread, answers


def wait_for_active(server: Operated, count: int) -> None:
    wait_until(lambda: metric(server.served.metrics_port, "nv_trt_llm_request_metrics", "active") >= count)


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5):
            return True
    except urllib.error.HTTPError:
        return False


def test_engines_change_without_losing_a_request(server: Operated, engines: tuple[Path, Path], key_file: Path, run):
    before = server.tokens(LONG), server.text(LONG)
    is_over = threading.Event()
    under_way = [ask_until(is_over, work) for work in (server.tokens, server.text) * 2]
    wait_for_active(server, 4)
    reload = ["reload", "--http", f"127.0.0.1:{server.served.http_port}", "--admin-key-file", key_file]
    status, out, err = run(*reload, "--engine-dir", engines[1])
    assert status == 0 and str(engines[1]) in out, err
    wait_until(lambda: not before[1].startswith(server.text(40)))  # text models switch a moment after Triton does
    is_over.set()
    later = server.tokens(LONG), server.text(LONG)
    for thread, _ in under_way:
        thread.join(60)
    change = server.line(message="a new engine replaces this one, which closes after its last answers")
    changed = datetime.fromisoformat(change["time"]).timestamp()
    asked = zip(under_way, before * 2, later * 2, strict=True)
    answers = [(old, new, *each) for (_, given), old, new in asked for each in given]
    assert all(answer in (old, new) for old, new, _, _, answer in answers)
    assert any(begin < changed < end and answer == old for old, _, begin, end, answer in answers), "none was under way"
    _, printed, _ = run("generate", "--engine-dir", engines[1], "--prompt-ids", "5,6,7", "--max-tokens", 8, "--json")
    want = json.loads(printed)["token_ids"]
    assert later[0][: len(want)] == want != before[0][: len(want)]
    send(server.openai, "/v1/completions", {"prompt": [PROMPT], "max_tokens": 5})
    wait_for_free_blocks(server.served.metrics_port)
    assert is_ready(server.served.http_port) and server.served.process.poll() is None


def test_engines_that_cannot_be_served_leave_those_that_are(
    server: Operated, engines: tuple[Path, Path], key_file: Path, run, tmp_path: Path
):
    before = server.tokens(20)
    reload = ["reload", "--http", f"127.0.0.1:{server.served.http_port}", "--admin-key-file", key_file]
    status, _, err = run(*reload, "--engine-dir", tmp_path)
    assert status == 1 and "build engines into this directory first" in err and err.count("\n") == 1
    admin = Administration(f"127.0.0.1:{server.served.http_port}", KEY)
    config = admin.config("tensorrt_llm")
    config["parameters"]["num_kv_blocks"] = {"string_value": "3"}
    with pytest.raises(AdminError, match=r"^num_kv_blocks = 3: one context of 256 tokens needs at least 16 blocks"):
        admin.load("tensorrt_llm", config, 60)
    wrong = Administration(f"127.0.0.1:{server.served.http_port}", "another-key-of-letters")
    with pytest.raises(AdminError, match="refuses the admin key"):
        wrong.load("tensorrt_llm", config, 60)
    assert server.tokens(20) == before and is_ready(server.served.http_port)


def test_what_serves_is_still_counted_when_another_engine_has_ended(server: Operated):
    wait_until(lambda: list(server.served.models().values()).count("tensorrt_llm") == 1)  # the other was replaced
    counted = metric(server.served.metrics_port, REQUESTS, "length")
    server.tokens(20)
    wait_until(lambda: metric(server.served.metrics_port, REQUESTS, "length") > counted)


def test_a_drain_is_not_ready_and_answers_what_is_under_way(server: Operated):
    pool, asked = ThreadPoolExecutor(3), {"prompt": [PROMPT], "max_tokens": LONG + 100, "ignore_eos": True}
    under_way: list[Any] = [pool.submit(work, LONG) for work in (server.tokens, server.text)]
    under_way.append(pool.submit(send, server.openai, "/v1/completions", asked))
    wait_for_active(server, 3)
    assert is_ready(server.served.http_port)
    server.served.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not is_ready(server.served.http_port))
    late = {"input_ids": PROMPT, "input_lengths": 3, "request_output_len": 4}
    for model, body in {"tensorrt_llm": late, "ensemble": {"text_input": "def", "max_tokens": 4}}.items():
        while (told := post(server.served.http_port, f"/v2/models/{model}/generate", body))[0] == 200:
            pass
        assert SHUTTING_DOWN in told[1], told
    time.sleep(2.0)  # by then a model that is unloaded has gone
    assert not (is_ready(server.served.http_port) or all(each.done() for each in under_way))
    assert all(len(each.result(60)) > LONG // 4 for each in under_way)
    assert server.served.process.wait(40) == 0
