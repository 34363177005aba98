"""`AnswerStream`: the growing answer of one sequence. The engine's outputs go in; tokens and their text come out.

Triton's tensors, the OpenAI server and the Python API all build their answers on it. The joined text depends on the
tokens alone, not on how they were split into outputs, so streamed text equals unary text. A character with missing
bytes is held back; at the end of the answer it becomes U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from faser_backend.core.errors import Failure
from faser_backend.core.request import EngineOutput, FinishReason, RequestStats
from faser_backend.text.tokenizer import TextTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 8  # a UTF-8 character takes at most 4 byte tokens; longer sequences are invalid text
NUM_CONTEXT_TOKENS = 6  # decoded before new tokens, so that leading spaces survive
REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.STOPPED: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


class ByteDecoder:
    """A decoder for byte-level vocabularies, exact: a table look-up and incremental UTF-8 decoding."""

    def __init__(self, token_bytes: list[bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        is_known = 0 <= token_id < len(self._token_bytes)
        return self._utf8.decode(self._token_bytes[token_id]) if is_known else ""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """A decoder for any other vocabulary: decodes a short window of tokens and takes what the new token added."""

    def __init__(self, tokenizer: TextTokenizer, context_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held = [*context_ids]
        self._settle()

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._added_text()
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        self._settle()
        return text

    def finish(self) -> str:
        text = self._added_text() if self._held else ""
        self._settle()
        return text

    def _added_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        after = self._tokenizer.decode(self._context + self._held)
        if not after.startswith(before):  # the vocabulary rewrites earlier text: decode the new tokens alone
            return self._tokenizer.decode(self._held)
        return after[len(before) :]

    def _settle(self) -> None:
        self._context = (self._context + self._held)[-NUM_CONTEXT_TOKENS:]
        self._held = []
        while self._tokenizer.decode(self._context).startswith(REPLACEMENT):
            del self._context[0]  # else the rest of a character would spoil the bytes behind it


class StopMatcher:
    """A text that ends at its first stop string, which may begin and end inside different tokens.

    The match that ends first wins; of several that end together, the longest. `includes_stop` keeps the stop string in
    the text; without it, text that may still become a stop string is held back.
    """

    def __init__(self, stop_strings: Sequence[str], *, includes_stop: bool) -> None:
        self._stops = sorted({stop for stop in stop_strings if stop}, key=len, reverse=True)
        self._includes_stop = includes_stop
        self._num_tail = len(self._stops[0]) - 1 if self._stops else 0
        self._tail = ""  # the end of the text, in which a match may still begin
        self._num_unsent = 0  # characters at the end of _tail that are held back
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that may be sent now and whether a stop string has ended it."""
        if not self._stops:
            return text, False
        seen = self._tail + text
        sent = len(self._tail) - self._num_unsent
        starts = ((stop, seen.find(stop, max(0, len(self._tail) - len(stop) + 1))) for stop in self._stops)
        matches = [(start + len(stop), start) for stop, start in starts if start >= 0]
        if matches:
            end, start = min(matches)
            self.matched = seen[start:end]
            return seen[sent : max(sent, end if self._includes_stop else start)], True
        held = 0 if self._includes_stop else max(num_may_begin(seen, stop) for stop in self._stops)
        ready = seen[sent : len(seen) - held]
        self._tail = seen[max(0, len(seen) - self._num_tail) :] if self._num_tail else ""
        self._num_unsent = held
        return ready, False

    def finish(self) -> str:
        """Returns the text that is still held back."""
        held = self._tail[len(self._tail) - self._num_unsent :]
        self._num_unsent = 0
        return held


def num_may_begin(text: str, mark: str) -> int:
    """Returns the number of characters at the end of the text with which the mark may begin."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start >= 0 and not mark.startswith(text[start:]):
        start = text.find(mark[0], start + 1)
    return len(text) - start if start >= 0 else 0


class TextPiece(NamedTuple):
    """The text that one token added; is_drafted: the draft proposed the token, and the target accepted it."""

    text: str
    is_drafted: bool


class AnswerToken(NamedTuple):
    """A token of an answer, and the text that it added.

    top: (token id, log-probability) of the best alternatives at its position, best first, if the request wants them.
    """

    token_id: int
    text: str
    is_drafted: bool = False
    log_prob: float | None = None
    rank: int | None = None  # among all tokens, from 1; None without logits
    top: Sequence[tuple[int, float]] = ()


class AnswerPart(NamedTuple):
    """The part of an answer that one output adds. rest: at the end of the answer, the text after its last token."""

    tokens: list[AnswerToken]
    rest: str = ""

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens) + self.rest

    @property
    def pieces(self) -> list[TextPiece]:
        """One piece per token, and one for the rest."""
        pieces = [TextPiece(token.text, token.is_drafted) for token in self.tokens]
        return [*pieces, TextPiece(self.rest, False)] if self.rest else pieces


class AnswerStream:
    """The answer of one sequence: `add` takes every output of the engine.

    Tokens after a stop string are dropped. The last output, or a call of `finish`, ends the answer.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        prompt_ids: Sequence[int] | np.ndarray = (),
        *,
        stop_strings: Sequence[str] = (),
        includes_stop: bool = True,
        num_top: int | None = None,
    ) -> None:
        """tokenizer: None if no text is needed. num_top: number of alternatives per token."""
        self._decoder: ByteDecoder | WindowDecoder | None = None
        if tokenizer is not None and tokenizer.token_bytes is not None:
            self._decoder = ByteDecoder(tokenizer.token_bytes)
        elif tokenizer is not None:
            self._decoder = WindowDecoder(tokenizer, [int(token_id) for token_id in prompt_ids[-NUM_CONTEXT_TOKENS:]])
        self._stops = StopMatcher(stop_strings, includes_stop=includes_stop)
        self._num_top = num_top
        self.is_stopped = False  # a stop string has ended the text
        self.stats: RequestStats | None = None  # the newest
        self.finish_reason: FinishReason | None = None
        self.error: Failure | None = None  # with finish_reason ERROR
        self.cum_log_prob = 0.0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    @property
    def reason(self) -> str | None:
        """The finish reason in the words of OpenAI and vLLM; None while the answer grows."""
        reason = None if self.finish_reason is None else REASONS[self.finish_reason]
        return "stop" if self.is_stopped and reason in (None, "length") else reason

    def add(self, output: EngineOutput) -> AnswerPart:
        """Returns what the output of a step adds; accepted drafted tokens come first."""
        num_accepted = 0
        if output.stats is not None:
            num_accepted = output.stats.num_accepted - (self.stats.num_accepted if self.stats else 0)
            self.stats = output.stats
        if self._num_top:
            condense(output, self._num_top)
        tokens = []
        for index, token_id in enumerate(output.token_ids):
            if self.is_stopped:
                break
            text = "" if self._decoder is None else self._match(self._decoder.push(token_id))
            log_prob = None if output.log_probs is None else output.log_probs[index]
            self.cum_log_prob += log_prob or 0.0
            rank, top = output.alternatives[index] if output.alternatives else (None, [])
            tokens.append(AnswerToken(token_id, text, index < num_accepted, log_prob, rank, top[: self._num_top]))
        if output.finish_reason is None:
            return AnswerPart(tokens)
        self.finish_reason, self.error = output.finish_reason, output.error
        return AnswerPart(tokens, self.finish())

    def finish(self) -> str:
        """Returns the rest: an incomplete character as U+FFFD, and text that did not become a stop string."""
        if self.is_stopped or self._decoder is None:
            return ""
        text = self._match(self._decoder.finish())
        return text if self.is_stopped else text + self._stops.finish()

    def _match(self, text: str) -> str:
        if text:
            text, self.is_stopped = self._stops.push(text)
        return text


def condense(output: EngineOutput, count: int) -> None:
    """Replaces logits by the rank of each token and the `count` best: a kilobyte instead of the vocabulary."""
    if output.generation_logits is not None:
        pairs = zip(output.generation_logits, output.token_ids, strict=False)
        output.alternatives = [(1 + int((row > row[one]).sum()), best_log_probs(row, count)) for row, one in pairs]
        output.generation_logits = None


def best_log_probs(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    """Returns (token id, log-probability) of the `count` largest logits [vocab_size], best first; ties by lowest id."""
    count = min(count, logits.size)
    # At least `count` logits reach the least of the `count` largest maxima of blocks: few are sorted.
    size = max(1, logits.size // (8 * count))
    maxima = logits[: logits.size // size * size].reshape(-1, size).max(axis=1)
    best = np.flatnonzero(~(logits < np.partition(maxima, -count)[-count]))
    best = best[np.lexsort((best, -logits[best]))[:count]]
    norm = logits[best[0]] + np.log(np.exp(logits - logits[best[0]]).sum(dtype=np.float64))
    return [(int(one), float(logits[one] - norm)) for one in best]
