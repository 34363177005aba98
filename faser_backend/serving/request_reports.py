"""Reports of requests and of processes: the life of a request, logs, and traces.

A frontend fills a `RequestLife` off the engine's thread and passes it to its listeners when the request has ended.
Times are nanoseconds of the engine's clock, which all processes share.

Logs of all processes are plain lines, or JSON lines with the id of their request.

Traces are OpenTelemetry spans of ended requests, sent to a collector (extra `tracing`). Each request has a span after
the conventions for generative models, with children `queue`, `prefill` and `decode` per sequence. Spans are made after
the request, from times that the engine records anyway; a thread of the SDK sends them. If the collector is too slow,
the SDK drops spans and logs it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from faser_backend.core.errors import ConfigError
from faser_backend.core.request import EngineOutput, Request, RequestStats

MAX_ROUNDS = 64  # recorded one by one, per sequence
CONTEXT_HEADERS = ("traceparent", "tracestate")  # of W3C Trace Context


@dataclass(slots=True, eq=False)
class SequenceLife:
    """One sequence of a request. rounds: when its tokens reached the frontend, and how many; the first MAX_ROUNDS."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_output_tokens: int = 0
    rounds: list[tuple[int, int]] = field(default_factory=list)
    stats: RequestStats | None = None  # with the last output
    finish_reason: str = ""

    @classmethod
    def of(cls, request: Request) -> SequenceLife:
        return cls(request.request_id, int(request.prompt_ids.size), request.max_tokens)

    def add(self, output: EngineOutput, now_ns: int) -> None:
        self.num_output_tokens += len(output.token_ids)
        if output.token_ids and len(self.rounds) < MAX_ROUNDS:
            self.rounds.append((now_ns, len(output.token_ids)))
        if output.finish_reason is not None:
            self.finish_reason, self.stats = output.finish_reason.value, output.stats


@dataclass(slots=True, eq=False)
class RequestLife:
    """A request of one client.

    request_id: the prefix of its sequences' ids. client_id: the client's own id, or empty.
    """

    request_id: str
    received_ns: int
    client_id: str = ""
    model: str = ""  # its name
    parameters: Mapping[str, Any] = field(default_factory=dict)  # Triton's, which include forwarded headers
    parsed_ns: int = 0  # all tensors are read and tokenised
    submitted_ns: int = 0  # all sequences are submitted to the engine
    answered_ns: int = 0  # the engine has ended the last sequence
    ended_ns: int = 0  # the last response is sent
    queued_for_ns: int = 0  # duration in the engine before the last sequence was scheduled
    postprocessing_ns: int = 0  # time spent on turning tokens into text and tensors
    sending_ns: int = 0  # time spent on passing responses to Triton
    num_prompts: int = 0
    error: str = ""
    sequences: dict[str, SequenceLife] = field(default_factory=dict)  # by request id; empty without listeners

    @property
    def context(self) -> dict[str, str]:
        """The client's trace headers, with lower-case names."""
        return {name.lower(): str(value) for name, value in self.parameters.items() if name.lower() in CONTEXT_HEADERS}


Listener = Callable[[RequestLife], None]  # called once per request on a frontend's thread; must not block


def report_ended(life: RequestLife, listeners: Iterable[Listener]) -> None:
    """Calls the listeners with a request that has ended now. Logs their errors."""
    life.ended_ns = time.perf_counter_ns()
    for listener in listeners:
        try:
            listener(life)
        except Exception:  # the request is answered all the same
            _requests.exception("a listener failed for an ended request", extra=about(life.request_id))


# -- logs -------------------------------------------------------------------------------------------------------------
TEXT = "%(levelname)s %(name)s: %(message)s"
JSON_START = b'{"time": "'
FIELD = "fields"  # the attribute of a record that holds further values by name
_requests = logging.getLogger("faser.requests")
_requests.setLevel(logging.INFO)  # in every process


class JsonFormatter(logging.Formatter):
    """{"time", "level", "logger", "process", "message"}, with the `fields` of `extra` and an error's traceback."""

    def __init__(self, process: str) -> None:
        """process: name of a model or command."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, FIELD, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(log_format: str, process: str, level: int = logging.INFO) -> None:
    """Sends the logs of this process to stderr. Call once, before anything is logged."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def line_logger(log_format: str) -> Callable[[str, str], None]:
    """Returns a function of level and message that prints messages of `faser serve`, plain or as JSON."""
    formatter = JsonFormatter("serve")

    def log(level: str, message: str) -> None:
        if log_format == "json":
            number = logging.getLevelNamesMapping()[level]
            line = formatter.format(logging.LogRecord("faser", number, "", 0, message, None, None))
        else:
            line = f"error: {message}" if level == "ERROR" else message
        sys.stderr.write(line + "\n")  # in one piece: Triton's lines come from another thread
        sys.stderr.flush()

    return log


def about(request_id: str, **fields: Any) -> dict[str, Any]:
    """Returns `extra` for a log line about a request."""
    return {FIELD: {"request_id": request_id, **fields}}


def log_clamp(asked: int, request: Request) -> None:
    """Logs that a request gets fewer tokens than it asks for, if it does."""
    if request.max_tokens >= asked:
        return
    message = "max_tokens = %d: clamped to %d, the room in the context behind a prompt of %d tokens"
    client_id = request.request_id.partition(".")[0]
    _requests.warning(message, asked, request.max_tokens, request.prompt_ids.size, extra=about(client_id))


def log_request(life: RequestLife) -> None:
    """Logs a line for an ended request, with its id and counts (a Listener)."""
    sequences = life.sequences.values()
    fields = {
        "num_input_tokens": sum(each.num_prompt_tokens for each in sequences),
        "num_output_tokens": sum(each.num_output_tokens for each in sequences),
        "finish_reasons": [each.finish_reason for each in sequences],
        "duration_ms": round((life.ended_ns - life.received_ns) / 1e6, 3),
        **({"client_id": life.client_id} if life.client_id else {}),
        **({"error": life.error} if life.error else {}),
        **life.context,
    }
    level = logging.WARNING if life.error else logging.INFO
    _requests.log(level, "request failed" if life.error else "request ended", extra=about(life.request_id, **fields))


# -- traces -----------------------------------------------------------------------------------------------------------
TRACING_EXTRA = "pip install 'faser-backend[tracing]'"
EXPORT_TIMEOUT_S = 2.0  # of one export; a server that ends waits no longer
CLOSE_MS = 1500


def check_endpoint(url: str) -> str:
    """Returns a collector's URL without the path of traces. Raises ConfigError for a bad URL or a missing extra."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the address or the port
        is_url = False
    if not is_url or parts.query or parts.fragment:
        raise ConfigError(f"--otlp-endpoint = {url!r:.200}: must be http://HOST:PORT or https://HOST:PORT")
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    except ImportError:
        raise ConfigError(f"--otlp-endpoint = {url!r:.200}: needs OpenTelemetry: {TRACING_EXTRA}") from None
    return url.rstrip("/")


def forward_options() -> list[str]:
    """Returns options of tritonserver that pass a client's trace context to the models as request parameters."""
    pattern = f"(?i){'|'.join(CONTEXT_HEADERS)}"
    return [f"--http-header-forward-pattern={pattern}", f"--grpc-header-forward-pattern={pattern}"]


class Tracing:
    """Makes and sends the spans of one process. `trace` is a Listener."""

    def __init__(self, endpoint: str, *, processor: Any = None) -> None:
        """endpoint: from check_endpoint. processor: receives spans instead, for tests."""
        check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        names = {"service.name": "faser", "service.version": version("faser-backend")}
        self._provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
        if processor is None:
            exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
            processor = BatchSpanProcessor(exporter, schedule_delay_millis=1000)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("faser", names["service.version"])

    def trace(self, life: RequestLife) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        epoch_ns = time.time_ns() - time.perf_counter_ns()  # spans have the time of day
        span = self._tracer.start_span(
            f"text_completion {life.model}",
            TraceContextTextMapPropagator().extract(life.context),
            SpanKind.SERVER,
            request_attributes(life),
            start_time=epoch_ns + life.received_ns,
        )
        if life.error:
            span.set_status(StatusCode.ERROR, life.error)
        if span.is_recording():
            within = set_span_in_context(span)
            for index, sequence in enumerate(life.sequences.values()):
                self._trace_phases(sequence, {"faser.sequence": index}, within, epoch_ns)
        span.end(epoch_ns + life.ended_ns)

    def _trace_phases(self, sequence: SequenceLife, names: dict[str, Any], within: Any, epoch_ns: int) -> None:
        stats = sequence.stats
        if stats is None:
            return
        times = (stats.arrival_ns, stats.first_scheduled_ns, stats.first_token_ns, stats.last_token_ns)
        for name, start_ns, end_ns in zip(("queue", "prefill", "decode"), times, times[1:], strict=False):
            if not end_ns:  # the sequence ended before this phase
                return
            span = self._tracer.start_span(name, within, attributes=names, start_time=epoch_ns + start_ns)
            for time_ns, num_tokens in sequence.rounds if name == "decode" else ():
                span.add_event("round", {"faser.output_tokens": num_tokens}, epoch_ns + time_ns)
            span.end(epoch_ns + end_ns)

    def close(self) -> None:
        """Sends the remaining spans, for at most CLOSE_MS."""
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()


def request_attributes(life: RequestLife) -> dict[str, Any]:
    """Returns attributes after the conventions for generative models; all others begin with `faser.`."""
    sequences = list(life.sequences.values())
    found: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "faser",
        "gen_ai.request.model": life.model,
        "faser.request_id": life.request_id,
        **({"faser.client_id": life.client_id} if life.client_id else {}),
        **({"error.type": "request_error"} if life.error else {}),
    }
    if not sequences:
        return found
    stats = [each.stats for each in sequences if each.stats is not None]
    return found | {
        "gen_ai.request.max_tokens": max(each.max_tokens for each in sequences),
        "gen_ai.request.choice.count": len(sequences),
        "gen_ai.usage.input_tokens": sum(each.num_prompt_tokens for each in sequences),
        "gen_ai.usage.output_tokens": sum(each.num_output_tokens for each in sequences),
        "gen_ai.response.finish_reasons": [each.finish_reason for each in sequences if each.finish_reason],
        "faser.drafted_tokens": sum(each.num_drafted for each in stats),
        "faser.accepted_tokens": sum(each.num_accepted for each in stats),
        "faser.pruned_tokens": sum(each.num_pruned for each in stats),
        "faser.reused_tokens": sum(each.num_reused_tokens for each in stats),
        "faser.verifications": sum(each.num_steps for each in stats),
        "faser.preemptions": sum(each.num_preemptions for each in stats),
    }
