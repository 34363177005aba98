"""What the Python API answers: `RequestOutput`, and `GrowingAnswer`, which makes its parts of what steps emit.

Names are vLLM's where they mean the same. Knows nothing of the engine's threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from faser_backend.core.errors import Failure
from faser_backend.core.request import FinishReason, Request, RequestStats
from faser_backend.core.request import RequestOutput as EngineOutput
from faser_backend.serving.log_probs import best_log_probs
from faser_backend.serving.text_stream import TextStream
from faser_backend.serving.tokenizer import TextTokenizer

NUM_CONTEXT_TOKENS = 16  # of the prompt, for vocabularies whose first word depends on what stands before it
_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.STOPPED: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


class TextPiece(NamedTuple):
    """The text that one token added; is_drafted: the draft guessed the token, and the target accepted it."""

    text: str
    is_drafted: bool


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
        """What is new in the text."""
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

    def __init__(
        self,
        request: Request,
        tokenizer: TextTokenizer,
        *,
        index: int,
        stop_strings: list[str],
        includes_stop: bool,
        num_top: int | None,
    ) -> None:
        """num_top: alternatives beside each token's log-probability; None: no log-probabilities."""
        self.request = request
        self.is_ended = False
        self._tokenizer = tokenizer
        self._index = index
        self._num_top = num_top
        context_ids = request.prompt_ids[-NUM_CONTEXT_TOKENS:].tolist()
        self._stream = TextStream(
            tokenizer, context_ids=context_ids, stop_strings=stop_strings, includes_stop=includes_stop
        )
        self._text = ""
        self._token_ids: list[int] = []
        self._is_drafted: list[bool] = []
        self._new_pieces: list[TextPiece] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        self._num_accepted = 0  # in the steps so far
        self._reason: FinishReason | None = None
        self._error: Failure | None = None
        self._stats: RequestStats | None = None

    @property
    def is_stopped(self) -> bool:
        """A stop string has ended the text: what else the engine emits is dropped."""
        return self._stream.is_stopped

    @property
    def has_news(self) -> bool:
        return bool(self._new_pieces)

    def add(self, output: EngineOutput) -> None:
        """Takes what one step emitted."""
        num_accepted = 0 if output.stats is None else output.stats.num_accepted - self._num_accepted
        for place, token_id in enumerate(output.token_ids):
            if self.is_stopped:
                break
            is_drafted = place < num_accepted  # of what a step emits, what was drafted comes first
            self._push(TextPiece(self._stream.push([token_id]).text, is_drafted))
            self._token_ids.append(token_id)
            self._is_drafted.append(is_drafted)
            if self._num_top is not None and output.log_probs is not None:
                self._cumulative += output.log_probs[place]
                self._logprobs.append(self._logprob(token_id, place, output))
        self._num_accepted += num_accepted
        if output.is_final:
            self._push(TextPiece(self._stream.finish(), False))
            self._reason, self._error, self._stats = output.finish_reason, output.error, output.stats
            self.is_ended = True

    def snapshot(self) -> CompletionOutput:
        """The answer so far. What is new in it is new once."""
        pieces, self._new_pieces = tuple(self._new_pieces), []
        wants_logprobs = self._num_top is not None
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=self._token_ids.copy(),
            is_drafted=self._is_drafted.copy(),
            new_pieces=pieces,
            seed=self.request.sampling.seed,
            logprobs=self._logprobs.copy() if wants_logprobs else None,
            cumulative_logprob=self._cumulative if wants_logprobs else None,
            finish_reason=None if self._reason is None else _REASONS[self._reason],
            stop_reason=self._stop_reason(),
            error=self._error,
            stats=self._stats,
        )

    def _push(self, piece: TextPiece) -> None:
        if piece.text:
            self._text += piece.text
            self._new_pieces.append(piece)

    def _stop_reason(self) -> str | int | None:
        if self._stream.matched_stop is not None:
            return self._stream.matched_stop
        return self._token_ids[-1] if self._reason is FinishReason.STOP_WORDS else None

    def _logprob(self, token_id: int, place: int, output: EngineOutput) -> dict[int, Logprob]:
        """Of the token at `place` of an output: its own first, then the best alternatives."""
        assert output.log_probs is not None
        top: list[tuple[int, float]] = []
        rank = None
        if self._num_top and output.generation_logits is not None:
            logits = output.generation_logits[place]
            top = best_log_probs(logits, self._num_top)
            rank = 1 + int((logits > logits[token_id]).sum())
        found = {token_id: Logprob(output.log_probs[place], rank, self._word(token_id))}
        for better, (other, value) in enumerate(top):
            found.setdefault(other, Logprob(value, better + 1, self._word(other)))
        return found

    def _word(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skips_special_tokens=False)
