"""The answers of the Python API: `RequestOutput`, and `GrowingAnswer`, which makes its parts of what steps emit.

Names are vLLM's where they mean the same. Knows nothing of the engine's threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from faser_backend.api.params import SamplingParams
from faser_backend.core.errors import Failure
from faser_backend.core.request import EngineOutput, FinishReason, Request, RequestStats
from faser_backend.text.answer_stream import AnswerStream, AnswerToken, TextPiece
from faser_backend.text.tokenizer import TextTokenizer

_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.STOPPED: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


class Logprob(NamedTuple):
    """rank: place among all tokens, from 1; None where no alternatives were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt: all of it so far, and in `new_pieces` what came since the output before.

    logprobs: per token, of the token itself and of the best alternatives, by token id. finish_reason: None while it
    grows, then "stop", "length", "abort" or, with `error`, "error". stop_reason: the stop string or token id that ended
    it. stats: the counters of the engine, with the last output.
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
    error: Failure | None = None  # what failed this answer alone: what there is of it came before
    stats: RequestStats | None = None

    @property
    def text_diff(self) -> str:
        """The new part of the text."""
        return "".join(piece.text for piece in self.new_pieces)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt. `text` and `token_ids` are those of the first answer."""

    request_id: str
    index: int  # of the prompt in the call
    prompt: str | None  # None where token ids were given; a conversation as its template wrote it
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
        """Draft tokens that were verified for all answers, once these have ended."""
        return sum(one.stats.num_drafted for one in self.outputs if one.stats is not None)

    @property
    def num_accepted(self) -> int:
        return sum(one.stats.num_accepted for one in self.outputs if one.stats is not None)

    @property
    def acceptance(self) -> float | None:
        """num_accepted / num_drafted; None where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


class GrowingAnswer:
    """One sequence as it grows: `add` takes the engine's outputs, `snapshot` gives the answer so far."""

    def __init__(self, request: Request, params: SamplingParams, tokenizer: TextTokenizer, index: int) -> None:
        self.request = request
        self.has_news = False  # since the last snapshot: text, or the end
        self._tokenizer = tokenizer
        self._index = index
        self._wants_logprobs = params.logprobs is not None
        self._stream = AnswerStream(
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
        self._last = EngineOutput(request.request_id, [])  # the final one, once it is there

    @property
    def is_stopped(self) -> bool:
        """A stop string has ended the text: what else the engine emits is dropped."""
        return self._stream.is_stopped

    @property
    def is_ended(self) -> bool:
        return self._last.is_final

    def add(self, output: EngineOutput) -> None:
        """Takes what one step emitted."""
        tokens = self._stream.add(output)
        self._tokens += tokens
        self._logprobs += map(self._logprobs_of, tokens) if self._wants_logprobs else ()
        pieces = [TextPiece(token.text, token.is_drafted) for token in tokens]
        if output.is_final:
            pieces.append(TextPiece(self._stream.finish(), False))
            self._last = output
        self._new_pieces += [piece for piece in pieces if piece.text]
        self.has_news = bool(self._new_pieces) or output.is_final
        self._text += "".join(piece.text for piece in pieces)

    def snapshot(self) -> CompletionOutput:
        """The answer so far. What is new in it is new once."""
        pieces, self._new_pieces, self.has_news = tuple(self._new_pieces), [], False
        last, stop_reason = self._last, self._stream.matched_stop
        if stop_reason is None and last.finish_reason is FinishReason.STOP_WORDS:
            stop_reason = self._tokens[-1].token_id
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=[token.token_id for token in self._tokens],
            is_drafted=[token.is_drafted for token in self._tokens],
            new_pieces=pieces,
            seed=self.request.sampling.seed,
            logprobs=self._logprobs.copy() if self._wants_logprobs else None,
            cumulative_logprob=sum(token.log_prob or 0.0 for token in self._tokens) if self._wants_logprobs else None,
            finish_reason=None if last.finish_reason is None else _REASONS[last.finish_reason],
            stop_reason=stop_reason,
            error=last.error,
            stats=last.stats,
        )

    def _logprobs_of(self, token: AnswerToken) -> dict[int, Logprob]:
        """The token's own first, then the best alternatives."""
        assert token.log_prob is not None
        found = {token.token_id: Logprob(token.log_prob, token.rank, self._word(token.token_id))}
        for rank, (other, value) in enumerate(token.top, 1):
            found.setdefault(other, Logprob(value, rank, self._word(other)))
        return found

    def _word(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skips_special_tokens=False)
