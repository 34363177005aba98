"""Sends OpenTelemetry spans of ended requests to a collector (extra `tracing`).

Each request has a span after the conventions for generative models, with children `queue`, `prefill` and `decode` per
sequence. Spans are made after the request, from times that the engine records anyway; a thread of the SDK sends them.
If the collector is too slow, the SDK drops spans and logs it.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from faser_backend.core.errors import ConfigError
from faser_backend.serving.request_life import CONTEXT_HEADERS, RequestLife, SequenceLife

TRACING_EXTRA = "pip install 'faser-backend[tracing]'"
EXPORT_TIMEOUT_S = 2.0  # of one export; a server that ends waits no longer
CLOSE_MS = 1500


def check_endpoint(url: str) -> str:
    """Returns a collector's URL without the path of traces. Raises ConfigError for a bad URL or a missing extra."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
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
    """Makes and sends the spans of one process. `trace` is a request_life.Listener."""

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
    }
    if life.error:
        found["error.type"] = "request_error"
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
