"""Records the life of a request, for traces, logs and counters.

A frontend fills a `RequestLife` as the request goes along, off the engine's thread, and hands it over when it has
ended. Times are nanoseconds of the engine's clock, which is that of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from faser_backend.core.request import EngineOutput, Request, RequestStats

MAX_ROUNDS = 64  # of a sequence that are told one by one


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
    """A request of one client. request_id: ours, with which those of its sequences begin. client_id: the client's, or
    empty. context: W3C trace headers that came along."""

    request_id: str
    received_ns: int
    client_id: str = ""
    context: Mapping[str, str] = field(default_factory=dict)
    parsed_ns: int = 0  # its tensors became sequences of token ids
    submitted_ns: int = 0  # the sequences were with the engine
    answered_ns: int = 0  # the engine had answered the last sequence
    ended_ns: int = 0  # the client had the last response
    queued_for_ns: int = 0  # in the engine, before its last sequence was scheduled
    postprocessing_ns: int = 0  # spent on making text and tensors of tokens
    sending_ns: int = 0  # spent on handing responses to the server
    num_prompts: int = 0
    error: str = ""
    sequences: dict[str, SequenceLife] = field(default_factory=dict)  # by request id; none where nobody listens


Listener = Callable[[RequestLife], None]  # called once per request, on a frontend's thread: hands over and returns
