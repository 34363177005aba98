"""`TextStream`: token ids in, text deltas out, for one request.

The joined deltas depend on the tokens alone, not on how they were cut into calls: unary answers
run through the same stream, so streamed text equals unary text exactly. A character whose bytes are
still incomplete is held back; what is incomplete at the end becomes U+FFFD. Knows nothing of Triton.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from faser_backend.serving.tokenizer import TextTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 8  # no UTF-8 character needs more byte tokens than 4; then it is invalid text
NUM_CONTEXT_TOKENS = 6  # decoded before new tokens, so that leading spaces survive


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text; `is_stopped` once a stop string has ended the stream."""

    text: str
    num_tokens: int  # tokens taken in, up to and including the one that completed a stop string
    is_stopped: bool


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
        """What was held back and never became a stop string."""
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


class TextStream:
    """Decoder and stop matcher of one request. Call `push` per batch of tokens, then `finish` once."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        context_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        includes_stop: bool = True,
    ) -> None:
        table = tokenizer.token_bytes
        self._decoder = WindowDecoder(tokenizer, context_ids) if table is None else ByteDecoder(table)
        self._stops = StopMatcher(stop_strings, includes_stop=includes_stop)
        self.is_stopped = False

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Takes new tokens; after a stop string everything is ignored."""
        parts = []
        for num_taken, token_id in enumerate(token_ids):
            if self.is_stopped:
                return TextDelta("".join(parts), num_taken, True)
            self._take(self._decoder.push(token_id), parts)
        return TextDelta("".join(parts), len(token_ids), self.is_stopped)

    def finish(self) -> str:
        """The rest: an incomplete character as U+FFFD, and text that never became a stop string."""
        if self.is_stopped:
            return ""
        parts: list[str] = []
        self._take(self._decoder.finish(), parts)
        if not self.is_stopped:
            parts.append(self._stops.finish())
        return "".join(parts)

    def _take(self, text: str, parts: list[str]) -> None:
        if text:
            ready, self.is_stopped = self._stops.push(text)
            parts.append(ready)
