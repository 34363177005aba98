"""A collector of OpenTelemetry on the loopback: takes spans over HTTP and keeps them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """spans: all that came, as messages of the protocol."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[Any] = []

    def wait_for(self, is_wanted: Callable[[Any], bool], timeout_s: float = 20.0) -> Any:
        """The first span that is wanted."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for span in list(self.spans):
                if is_wanted(span):
                    return span
            time.sleep(0.05)
        raise AssertionError(f"no such span among {[span.name for span in self.spans]}")

    def children(self, span: Any) -> dict[str, Any]:
        return {each.name: each for each in list(self.spans) if each.parent_span_id == span.span_id}


def attributes_of(span: Any) -> dict[str, Any]:
    """Names -> values of a span or an event."""
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
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            sent = ExportTraceServiceRequest.FromString(body)
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
