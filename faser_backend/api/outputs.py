"""The answers of the Python API: `RequestOutput`, and `GrowingAnswer`, which builds it from the engine's outputs.

Names are vLLM's where they mean the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from faser_backend.api.params import SamplingParams
from faser_backend.core.errors import Failure
from faser_backend.core.request import EngineOutput, FinishReason, Request, RequestStats
from faser_backend.text.answer_stream import AnswerStream, AnswerToken, TextPiece
from faser_backend.text.tokenizer import TextTokenizer


class Logprob(NamedTuple):
    """A token's log-probability. rank: among all tokens, from 1; None if no alternatives were requested."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt so far. `new_pieces` is what came since the previous output.

    logprobs: per token, by token id: the token itself and the best alternatives. finish_reason: None while the answer
    grows, then "stop", "length", "abort" or, with `error`, "error". stop_reason: the stop string or token id that ended
    it. stats: the engine's counters, in the last output.
    """

    index: int
    text: str
    token_ids: list[int]
    is_drafted: list[bool]  # by token
    new_pieces: tuple[TextPiece, ...]
    seed: int
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: Failure | None = None  # the failure of this answer alone; its tokens so far are kept
    stats: RequestStats | None = None

    @property
    def text_diff(self) -> str:
        """The new part of the text."""
        return "".join(piece.text for piece in self.new_pieces)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt. `text` and `token_ids` belong to the first answer."""

    request_id: str
    index: int  # of the prompt in the call
    prompt: str | None  # None for a prompt of token ids; for a conversation, the rendered text
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def num_drafted(self) -> int:
        """The draft tokens that were verified for all answers that have ended."""
        return sum(one.stats.num_drafted for one in self.outputs if one.stats is not None)

    @property
    def num_accepted(self) -> int:
        return sum(one.stats.num_accepted for one in self.outputs if one.stats is not None)

    @property
    def acceptance(self) -> float | None:
        """num_accepted / num_drafted; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


class GrowingAnswer:
    """One sequence's answer: `add` takes the engine's outputs, `snapshot` returns the answer so far."""

    def __init__(self, request: Request, params: SamplingParams, tokenizer: TextTokenizer, index: int) -> None:
        self.request = request
        self.has_news = False  # since the last snapshot: text, or the end
        self._tokenizer, self._index = tokenizer, index
        self._wants_logprobs = params.logprobs is not None
        self.stream = AnswerStream(
            tokenizer,
            request.prompt_ids,
            stop_strings=params.stop,
            includes_stop=params.include_stop_str_in_output,
            num_top=params.logprobs,
        )
        self._text = ""
        self._tokens: list[AnswerToken] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._new_pieces: list[TextPiece] = []

    @property
    def is_ended(self) -> bool:
        return self.stream.finish_reason is not None

    def add(self, output: EngineOutput) -> None:
        part = self.stream.add(output)
        self._text += part.text
        self._tokens += part.tokens
        self._logprobs += map(self._logprobs_of, part.tokens) if self._wants_logprobs else ()
        self._new_pieces += [piece for piece in part.pieces if piece.text]
        self.has_news = bool(self._new_pieces) or self.is_ended

    def snapshot(self) -> CompletionOutput:
        """Returns the answer so far. A piece is new in one snapshot only."""
        pieces, self._new_pieces, self.has_news = tuple(self._new_pieces), [], False
        stream, stop_reason = self.stream, self.stream.matched_stop
        if stop_reason is None and stream.finish_reason is FinishReason.STOP_WORDS:
            stop_reason = self._tokens[-1].token_id
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=[token.token_id for token in self._tokens],
            is_drafted=[token.is_drafted for token in self._tokens],
            new_pieces=pieces,
            seed=self.request.sampling.seed,
            logprobs=self._logprobs.copy() if self._wants_logprobs else None,
            cumulative_logprob=stream.cum_log_prob if self._wants_logprobs else None,
            finish_reason=stream.reason if self.is_ended else None,
            stop_reason=stop_reason,
            error=stream.error,
            stats=stream.stats if self.is_ended else None,
        )

    def _logprobs_of(self, token: AnswerToken) -> dict[int, Logprob]:
        """Returns the token's own log-probability, then those of the best alternatives."""
        assert token.log_prob is not None
        found = {token.token_id: Logprob(token.log_prob, token.rank, self._word(token.token_id))}
        for rank, (other, value) in enumerate(token.top, 1):
            found.setdefault(other, Logprob(value, rank, self._word(other)))
        return found

    def _word(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skips_special_tokens=False)
