"""One choice as it grows: the engine's outputs in, pieces of text and the reason of its end out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from faser_backend.core.request import NUM_CONTEXT_TOP, EngineOutput, RequestStats
from faser_backend.openai.requests import Generation, ServedModel
from faser_backend.openai.triton_client import TokenClient
from faser_backend.text.answer_stream import AnswerStream, AnswerToken, TextPiece

MAX_WAITING_PIECES = 64  # of one request, for a client that reads slowly; then its stream from Triton waits


@dataclass(slots=True)
class Piece:
    """The news of a choice. tokens: those of an echoed prompt too; parts: of the answer's text, token by token."""

    text: str = ""
    tokens: list[AnswerToken] = field(default_factory=list)
    parts: list[TextPiece] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" or "length", with the last piece


class Answer:
    """The text of one sequence, its counts, and the acceptance of its drafts."""

    def __init__(self, wanted: Generation, model: ServedModel) -> None:
        self.wanted = wanted
        self.model = model
        self.num_tokens = 0
        self.stats = RequestStats()
        self.finish_reason: str | None = None
        self.num_accepted_by_step: list[int] = []
        self._is_step_open = False  # drafted tokens were read, and not yet the token behind them
        self._has_echoed = not wanted.echoes
        self._stream = AnswerStream(
            model.tokenizer,
            wanted.request.prompt_ids,
            stop_strings=wanted.stop,
            includes_stop=False,
            num_top=wanted.num_top,
        )

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended it."""
        return self._stream.matched_stop

    @property
    def num_prompt_tokens(self) -> int:
        return self.wanted.request.prompt_ids.size

    def add(self, output: EngineOutput, is_drafted: Sequence[bool]) -> Piece:
        """Takes one response. Sets finish_reason once nothing that comes later counts."""
        piece = Piece()
        if not self._has_echoed:
            self._echo(piece, output)
        self.stats = output.stats or self.stats
        tokens = self._stream.add(output, is_drafted) if self.wanted.max_tokens else []
        self.num_tokens += len(tokens)
        for token in tokens:
            self._count(token.is_drafted)
            piece.text += token.text
            piece.parts.append(TextPiece(token.text, token.is_drafted))
        piece.tokens += tokens
        if self._stream.is_stopped or (tokens and tokens[-1].token_id in self.wanted.request.end_ids):
            self._finish(piece, "stop")
        elif self.num_tokens == self.wanted.max_tokens:
            self._finish(piece, "length")
        return piece

    def end(self) -> Piece:
        """The engine has ended the sequence: by a token of its own choice, or because somebody told it to stop."""
        piece = Piece()
        if not self._has_echoed:
            self._echo(piece, EngineOutput("", []))
        self._finish(piece, "stop")
        return piece

    def _count(self, is_drafted: bool) -> None:
        """Drafted tokens that were kept, by the step that emitted them: they come first, its own token behind."""
        if not self._is_step_open:
            self.num_accepted_by_step.append(0)
        self.num_accepted_by_step[-1] += is_drafted
        self._is_step_open = is_drafted

    def _finish(self, piece: Piece, reason: str) -> None:
        rest = self._stream.finish()
        self.finish_reason = piece.finish_reason = reason
        if rest:
            piece.text += rest
            piece.parts.append(TextPiece(rest, False))

    def _echo(self, piece: Piece, output: EngineOutput) -> None:
        """Repeats the prompt, with its log-probabilities where the output has them."""
        self._has_echoed = True
        stream = AnswerStream(self.model.tokenizer)
        tokens = stream.add(EngineOutput("", self.wanted.request.prompt_ids.tolist()))
        piece.text = "".join(token.text for token in tokens) + stream.finish()
        if output.context_log_probs is not None:
            num_top, piece.tokens = self.wanted.num_top or 0, tokens[:1]
            for token, row in zip(tokens[1:], output.context_log_probs.tolist(), strict=True):
                ids, values = row[1 : 1 + NUM_CONTEXT_TOP], row[1 + NUM_CONTEXT_TOP :]
                top = [(int(one), value) for one, value in zip(ids, values, strict=True)][:num_top]
                piece.tokens.append(token._replace(log_prob=row[0], top=top))


def speculation_of(answers: Sequence[Answer], *, is_detailed: bool) -> dict[str, Any]:
    """Acceptance of a request's drafts, in the form of vLLM's `metrics.speculative_decoding`; steps that drafted
    nothing count. num_spec_tokens is null: the length is chosen anew at every step."""
    steps, drafted, accepted = (
        sum(getattr(answer.stats, name) for answer in answers) for name in ("num_steps", "num_drafted", "num_accepted")
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
    async with aclosing(client.generate(answer.wanted)) as outputs:
        async for output, is_drafted in outputs:
            piece = answer.add(output, is_drafted)
            if piece.text or piece.parts or piece.finish_reason:
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
