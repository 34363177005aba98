"""Records the life of a request, for traces, logs and counters.

A frontend fills a `RequestLife` off the engine's thread and passes it to its listeners when the request has ended.
Times are nanoseconds of the engine's clock, which all processes share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
