"""Sets up the logs of all processes: plain lines, or JSON lines with the id of their request."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from faser_backend.core.request import Request
from faser_backend.serving.request_life import RequestLife

TEXT = "%(levelname)s %(name)s: %(message)s"
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
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up_logging(log_format: str, process: str, level: int = logging.INFO) -> None:
    """Sends the logs of this process to stderr. Call once, before anything is logged."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def line_logger(log_format: str, process: str) -> Callable[[str, str], None]:
    """Returns a function of level and message that prints a command's messages, plain or as JSON."""
    formatter = JsonFormatter(process)

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
    """Logs that a request gets fewer tokens than it asks for."""
    message = "max_tokens = %d: clamped to %d, the room in the context behind a prompt of %d tokens"
    client_id = request.request_id.partition(".")[0]
    _requests.warning(message, asked, request.max_tokens, request.prompt_ids.size, extra=about(client_id))


def log_request(life: RequestLife) -> None:
    """Logs a line for an ended request, with its id and counts (a request_life.Listener)."""
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
