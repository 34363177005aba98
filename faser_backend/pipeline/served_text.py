"""Text that was served before, to be looked up when n-grams draft: the prompts and answers of requests that have ended.

One index for all requests, of at most so many tokens: the oldest leave first. What it proposes depends on other
people's requests, so how fast an answer comes tells of them (docs/drafts.md); it is off unless asked for.
"""

from __future__ import annotations

import numpy as np

MATCH_LENGTHS = (6, 3)  # tokens that are looked up, longest first: shorter ones say little across requests
_END = -1  # behind every text


class ServedText:
    """The last max_tokens >= 1 tokens that ended requests left behind, ends of texts included.

    Positions count from the first token ever; position p lies in entry p modulo max_tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self._ring = np.full(max_tokens, _END, np.int64)
        self._stop = 0  # position behind the last token
        # By n: n-gram -> position behind its last occurrence that a token follows.
        self._followed: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in MATCH_LENGTHS}

    def __len__(self) -> int:
        """Tokens that are held."""
        return min(self._stop, self._ring.size)

    @property
    def num_entries(self) -> int:
        """N-grams that are held, at most len(MATCH_LENGTHS) for every token."""
        return sum(map(len, self._followed.values()))

    def add(self, token_ids: np.ndarray) -> None:
        """Takes in a text [n] that nobody extends any more; of one that is too long, its end."""
        text = token_ids[-(self._ring.size - 1) :].tolist() if self._ring.size > 1 else []
        if not text:
            return
        self._make_room(len(text) + 1)
        first = self._stop
        self._ring[np.arange(first, first + len(text) + 1) % self._ring.size] = [*text, _END]
        self._stop += len(text) + 1
        for n, followed in self._followed.items():
            for stop in range(n, len(text)):
                followed[tuple(text[stop - n : stop])] = first + stop

    def continuation(self, tail: list[int], num_tokens: int) -> tuple[list[int], int]:
        """What followed the last occurrence of the longest n-gram that ends `tail`: up to num_tokens tokens, and how
        many tokens before them agree with the tail's end. Fewer where the text ended there, none without a match."""
        for n, followed in self._followed.items():
            start = followed.get(tuple(tail[-n:]))
            if start is not None:
                break
        else:
            return [], 0
        copied = self._read(start, min(start + num_tokens, self._stop))
        before = self._read(max(start - len(tail), self._stop - len(self)), start)
        agreeing = 0
        while agreeing < len(before) and before[-1 - agreeing] == tail[-1 - agreeing]:
            agreeing += 1
        return copied[: copied.index(_END)] if _END in copied else copied, agreeing

    def _read(self, start: int, stop: int) -> list[int]:
        return self._ring[np.arange(start, stop) % self._ring.size].tolist()

    def _make_room(self, num_tokens: int) -> None:
        """Forgets the n-grams that begin in the entries that the next num_tokens are written to."""
        oldest = self._stop - len(self)
        leaving = range(oldest, max(oldest, self._stop + num_tokens - self._ring.size))
        tokens = self._read(leaving.start, min(leaving.stop + max(MATCH_LENGTHS), self._stop))
        for offset, position in enumerate(leaving):
            for n, followed in self._followed.items():
                ngram = tuple(tokens[offset : offset + n])
                if followed.get(ngram) == position + n:
                    del followed[ngram]
