"""`AnswerStream`: what the engine emits for one sequence in, tokens and their text out.

The joined texts depend on the tokens alone, not on how they were cut into outputs: unary answers run through the same
stream, so streamed text equals unary text exactly. A character whose bytes are still incomplete is held back; what is
incomplete at the end becomes U+FFFD. Knows nothing of Triton and of HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from faser_backend.core.request import EngineOutput
from faser_backend.text.tokenizer import TextTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 8  # no UTF-8 character needs more byte tokens than 4; then it is invalid text
NUM_CONTEXT_TOKENS = 6  # decoded before new tokens, so that leading spaces survive


class ByteDecoder:
    """Exact for byte-level vocabularies: a table look-up and an incremental UTF-8 decoder."""

    def __init__(self, token_bytes: list[bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        is_known = 0 <= token_id < len(self._token_bytes)
        return self._utf8.decode(self._token_bytes[token_id]) if is_known else ""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any other vocabulary: decodes a short window and returns what the new token added."""

    def __init__(self, tokenizer: TextTokenizer, context_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(context_ids[-NUM_CONTEXT_TOKENS:])
        self._held: list[int] = []

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
        if not after.startswith(before):  # the vocabulary rewrites its past: decode the new tokens alone
            return self._tokenizer.decode(self._held)
        return after[len(before) :]

    def _settle(self) -> None:
        self._context = (self._context + self._held)[-NUM_CONTEXT_TOKENS:]
        self._held = []


class StopMatcher:
    """Ends a text at the first stop string, which may begin and end inside different tokens.

    The match that ends first wins, of those that end together the longest. `includes_stop` keeps the
    stop string in the text; otherwise whatever may still become one is held back.
    """

    def __init__(self, stop_strings: Sequence[str], *, includes_stop: bool) -> None:
        self._stops = sorted({stop for stop in stop_strings if stop}, key=len, reverse=True)
        self._includes_stop = includes_stop
        self._num_tail = len(self._stops[0]) - 1 if self._stops else 0
        self._tail = ""  # seen text that a match may still begin in
        self._num_unsent = 0  # characters at the end of _tail that were held back
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that may be sent now and whether a stop string has ended it."""
        if not self._stops:
            return text, False
        seen = self._tail + text
        sent = len(self._tail) - self._num_unsent
        match = self._first_match(seen, len(self._tail))
        if match is not None:
            start, end = match
            self.matched = seen[start:end]
            return seen[sent : max(sent, end if self._includes_stop else start)], True
        held = 0 if self._includes_stop else self._num_may_become_stop(seen)
        ready = seen[sent : len(seen) - held]
        self._tail = seen[max(0, len(seen) - self._num_tail) :] if self._num_tail else ""
        self._num_unsent = held
        return ready, False

    def finish(self) -> str:
        """Returns the text that was held back and never became a stop string."""
        held = self._tail[len(self._tail) - self._num_unsent :]
        self._num_unsent = 0
        return held

    def _first_match(self, seen: str, num_old: int) -> tuple[int, int] | None:
        best: tuple[int, int] | None = None  # (end, start)
        for stop in self._stops:
            start = seen.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[0])

    def _num_may_become_stop(self, seen: str) -> int:
        for num_chars in range(min(self._num_tail, len(seen)), 0, -1):
            ending = seen[len(seen) - num_chars :]
            for stop in self._stops:  # the longest first
                if len(stop) < num_chars:
                    break
                if stop.startswith(ending):
                    return num_chars
        return 0


class TextPiece(NamedTuple):
    """The text that one token added; is_drafted: the draft guessed the token, and the target accepted it."""

    text: str
    is_drafted: bool


class AnswerToken(NamedTuple):
    """A token of an answer, and the text that it added.

    top: (token id, log-probability) of the best tokens in its place, the best first, where they were asked for.
    """

    token_id: int
    text: str
    is_drafted: bool = False
    log_prob: float | None = None
    rank: int | None = None  # among all tokens, from 1; None without logits
    top: Sequence[tuple[int, float]] = ()


class AnswerStream:
    """The answer of one sequence. Call `add` with every output, then `finish` once. What follows a stop string is
    ignored."""

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        prompt_ids: Sequence[int] | np.ndarray = (),
        *,
        stop_strings: Sequence[str] = (),
        includes_stop: bool = True,
        num_top: int | None = None,
    ) -> None:
        """tokenizer: None where nobody reads the text. num_top: best tokens wanted beside each."""
        self._decoder: ByteDecoder | WindowDecoder | None = None
        if tokenizer is not None and tokenizer.token_bytes is not None:
            self._decoder = ByteDecoder(tokenizer.token_bytes)
        elif tokenizer is not None:
            self._decoder = WindowDecoder(tokenizer, [int(token_id) for token_id in prompt_ids[-NUM_CONTEXT_TOKENS:]])
        self._stops = StopMatcher(stop_strings, includes_stop=includes_stop)
        self._num_top = num_top
        self._num_accepted = 0  # drafted tokens, in all outputs so far
        self.is_stopped = False  # a stop string has ended the text

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def add(self, output: EngineOutput, is_drafted: Sequence[bool] | None = None) -> list[AnswerToken]:
        """Returns the tokens of the output that count. is_drafted: by token; None where the output is that of one step,
        whose drafted tokens come first."""
        num_accepted = 0
        if output.stats is not None:
            num_accepted = output.stats.num_accepted - self._num_accepted
            self._num_accepted = output.stats.num_accepted
        tokens = []
        for place, token_id in enumerate(output.token_ids):
            if self.is_stopped:
                break
            text = "" if self._decoder is None else self._shown(self._decoder.push(token_id))
            was_drafted = place < num_accepted if is_drafted is None else is_drafted[place]
            log_prob = None if output.log_probs is None else output.log_probs[place]
            rank, top = None, ()
            if self._num_top and output.generation_logits is not None:
                logits = output.generation_logits[place]
                rank, top = 1 + int((logits > logits[token_id]).sum()), best_log_probs(logits, self._num_top)
            tokens.append(AnswerToken(token_id, text, was_drafted, log_prob, rank, top))
        return tokens

    def finish(self) -> str:
        """Returns the rest: an incomplete character as U+FFFD, and text that never became a stop string."""
        if self.is_stopped or self._decoder is None:
            return ""
        text = self._shown(self._decoder.finish())
        return text if self.is_stopped else text + self._stops.finish()

    def _shown(self, text: str) -> str:
        if text:
            text, self.is_stopped = self._stops.push(text)
        return text


def best_log_probs(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    """(token id, log-probability) of the `count` best of logits [vocab_size], best first; of equals the lowest id."""
    count = min(count, logits.size)
    best = np.argpartition(-logits, count - 1)[:count]
    shifted = logits.astype(np.float64) - logits.max()
    norm = np.log(np.exp(shifted).sum())
    return [(int(one), float(shifted[one] - norm)) for one in best[np.lexsort((best, -logits[best]))]]
