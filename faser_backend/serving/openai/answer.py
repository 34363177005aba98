"""One choice as it grows: tokens in, pieces of text, log-probabilities and the reason of its end out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from faser_backend.serving.log_probs import best_log_probs
from faser_backend.serving.openai.sampling import Generation
from faser_backend.serving.openai.triton_client import TokenClient, Tokens
from faser_backend.serving.text_stream import TextStream
from faser_backend.serving.tokenizer import TextTokenizer

MAX_WAITING_PIECES = 64  # of one request, for a client that reads slowly; then its stream from Triton waits
NUM_CONTEXT_TOKENS = 16  # of the prompt, for vocabularies whose first word depends on what stands before it


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """A token's text, bytes and log-probability, and the best alternatives as such triples.

    offset: characters of the choice's text before the token's.
    """

    text: str
    token_bytes: bytes | None
    log_prob: float | None  # None: nothing stands before it
    top: list[tuple[str, bytes | None, float]]
    offset: int


@dataclass(slots=True)
class Piece:
    """What is new in a choice. details: (text, whether it was drafted), token by token."""

    text: str = ""
    details: list[tuple[str, bool]] = field(default_factory=list)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" or "length", with the last piece


class Answer:
    """The text of one sequence, its counts, and the acceptance of its drafts."""

    def __init__(self, wanted: Generation, tokenizer: TextTokenizer, end_ids: Sequence[int]) -> None:
        self.wanted = wanted
        self.num_tokens = 0
        self.counters: dict[str, int] = {}
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None  # the stop string that ended it
        self._tokenizer = tokenizer
        self._end_ids = () if wanted.ignores_end else tuple(end_ids)
        self._accepted: list[int] = []  # by step that has ended: its drafted tokens that were kept
        self._has_echoed = False
        self._num_chars = 0  # of the text so far
        self._run = 0  # of the step that is being read
        self._stream = TextStream(
            tokenizer,
            context_ids=wanted.prompt_ids[-NUM_CONTEXT_TOKENS:],
            stop_strings=wanted.stop,
            includes_stop=False,
        )

    def add(self, tokens: Tokens) -> Piece:
        """Takes one response. Sets finish_reason once nothing that comes later counts."""
        piece = self._first_piece(tokens)
        self.counters = tokens.counters or self.counters
        if not self.wanted.max_tokens:
            self.finish_reason = "length"
        for index, token_id in enumerate(tokens.ids):
            if self.finish_reason is not None:
                break
            offset, text = self._num_chars, self._stream.push([token_id]).text
            self._num_chars += len(text)
            self.num_tokens += 1
            self._count(tokens.is_drafted[index])
            piece.text += text
            piece.details.append((text, tokens.is_drafted[index]))
            if tokens.log_probs is not None:
                logits = None if tokens.logits is None else tokens.logits[index]
                piece.log_probs.append(self._log_prob(token_id, tokens.log_probs[index], logits, offset))
            if self._stream.is_stopped:
                self.finish_reason, self.stop_reason = "stop", self._stream.matched_stop
            elif token_id in self._end_ids:
                self.finish_reason = "stop"
            elif self.num_tokens == self.wanted.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            self._finish(piece)
        return piece

    def end(self) -> Piece:
        """The engine has ended the sequence: by a token of its own choice, or because somebody told it to stop."""
        piece = self._first_piece(None)
        if self.finish_reason is None:
            self.finish_reason = "stop"
            self._finish(piece)
        return piece

    @property
    def num_accepted_by_step(self) -> list[int]:
        """Drafted tokens that were kept, by the step that emitted them: they come first, its own token behind."""
        return [*self._accepted, *([self._run] if self._run else [])]

    def _count(self, is_drafted: bool) -> None:
        self._run += is_drafted
        if not is_drafted:
            self._accepted.append(self._run)
            self._run = 0

    def _finish(self, piece: Piece) -> None:
        rest = self._stream.finish()
        piece.finish_reason = self.finish_reason
        if rest:
            piece.text += rest
            piece.details.append((rest, False))

    def _first_piece(self, tokens: Tokens | None) -> Piece:
        """One that repeats the prompt where that is wanted and was not done yet; else an empty one."""
        if not self.wanted.echoes or self._has_echoed:
            return Piece()
        self._has_echoed = True
        ids, stream = self.wanted.prompt_ids, TextStream(self._tokenizer)
        texts = [stream.push([one]).text for one in ids]
        offsets = list(accumulate(map(len, texts), initial=0))
        piece = Piece("".join(texts) + stream.finish())
        self._num_chars = len(piece.text)
        if tokens is not None and tokens.prompt_log_probs is not None and tokens.prompt_top_ids is not None:
            piece.log_probs = [TokenLogProb(*self._shown(ids[0]), None, [], 0)]
            count = self.wanted.num_top or 0
            rows = tokens.prompt_log_probs.tolist(), tokens.prompt_top_ids.tolist()
            for one, values, best, offset in zip(ids[1:], *rows, offsets[1:-1], strict=True):
                top = [(*self._shown(other), value) for other, value in zip(best[:count], values[1:], strict=False)]
                piece.log_probs.append(TokenLogProb(*self._shown(one), values[0], top, offset))
        return piece

    def _log_prob(self, token_id: int, log_prob: float, logits: np.ndarray | None, offset: int) -> TokenLogProb:
        top: list[tuple[str, bytes | None, float]] = []
        if logits is not None and self.wanted.num_top:
            top = [(*self._shown(one), value) for one, value in best_log_probs(logits, self.wanted.num_top)]
        return TokenLogProb(*self._shown(token_id), log_prob, top, offset)

    def _shown(self, token_id: int) -> tuple[str, bytes | None]:
        """A token's text and bytes. One that is part of a character is told by its bytes: every token has a name."""
        table = self._tokenizer.token_bytes
        if table is None or not table[token_id]:  # without a table, or special
            text = self._tokenizer.decode([token_id], skips_special_tokens=False)
            return text, text.encode()
        try:
            return table[token_id].decode(), table[token_id]
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in table[token_id]), table[token_id]


def speculation_of(answers: Sequence[Answer], *, is_detailed: bool) -> dict[str, Any]:
    """Acceptance of a request's drafts, in the form of vLLM's `metrics.speculative_decoding`; steps that drafted
    nothing count. num_spec_tokens is null: the length is chosen anew at every step."""
    steps, drafted, accepted = (
        sum(answer.counters.get(name, 0) for answer in answers) for name in ("num_steps", "num_drafted", "num_accepted")
    )
    by_step = [count for answer in answers for count in answer.num_accepted_by_step]
    by_count = Counter(count for count in by_step if count)
    histogram = [by_count[count] for count in range(max(by_count, default=0) + 1)]
    histogram[0] = max(0, steps - sum(histogram))
    metrics: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / max(steps, 1),
        "draft_acceptance_rate": accepted / max(drafted, 1),
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": None,
    }
    return metrics | ({"per_step_accepted": by_step} if is_detailed else {})


async def follow(client: TokenClient, answer: Answer) -> AsyncGenerator[Piece, None]:
    """The pieces of one choice, the last of which has a finish_reason. Closing it ends the request in the engine."""
    async with aclosing(client.generate(answer.wanted)) as tokens:
        async for new in tokens:
            piece = answer.add(new)
            if piece.text or piece.details or piece.finish_reason:
                yield piece
            if answer.stop_reason is not None:
                return
    # Where the engine ends the answer itself its stream is read to the end: a cancellation that meets the end of a
    # request can make Triton wait for that request for ever.
    if answer.finish_reason is None:
        yield answer.end()


async def follow_all(client: TokenClient, answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Piece], None]:
    """(index, piece) of several choices side by side, as they come. Closing it ends them all in the engine.

    Raises what the first of them that fails raises.
    """
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(MAX_WAITING_PIECES)

    async def run(index: int, answer: Answer) -> None:
        try:
            async with aclosing(follow(client, answer)) as pieces:
                async for piece in pieces:
                    await queue.put((index, piece))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(run(index, answer)) for index, answer in enumerate(answers)]
    try:
        num_open = len(tasks)
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
