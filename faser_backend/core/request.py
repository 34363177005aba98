"""Requests of clients (`Request`, `Sampling`) and the engine's answers (`EngineOutput`): plain data, validated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol, runtime_checkable

import numpy as np

from faser_backend.core.errors import ErrorCode, Failure, RequestError

# Limits of words per request and of their tokens in sum, because they are searched for with every token.
MAX_STOP_SEQUENCES = 64
MAX_STOP_TOKENS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_TOKENS = 8192
MAX_SEED = 2**64 - 1
GUIDE = "guided_decoding_guide"  # the field of a request that holds its grammar


class GrammarState(Protocol):
    """The state of one answer in its grammar. Not thread-safe.

    Every call raises RequestError naming GUIDE if it exceeds the library's limits.
    """

    def advance(self, tokens: list[int]) -> int:
        """Takes tokens up to the first that the grammar forbids. Returns how many."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undoes the last num_tokens that `advance` took."""

    def allowed(self) -> np.ndarray:
        """Returns bool [V]: the tokens that may come next, at least one; end tokens if the answer may end."""
        ...

    def forced(self) -> list[int]:
        """Returns the likely tokens of the only possible next text; [] if there is a choice."""
        ...


@runtime_checkable
class Grammar(Protocol):
    """Rules on the tokens of an answer, compiled once; each request has a state of its own. Immutable and thread-safe.

    It is the port between a grammar library and the sampler.
    """

    def start(self) -> GrammarState: ...


class FinishReason(Enum):
    """Why a request ended."""

    END_ID = "end_id"  # an end token was emitted (it is part of the output tokens)
    LENGTH = "length"  # max_tokens were emitted
    STOP_WORDS = "stop_words"  # a stop sequence was emitted
    CANCELLED = "cancelled"  # the client cancelled or went away
    STOPPED = "stopped"  # a stop request: a normal, shorter answer
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn from a row of logits. Defaults decode greedily.

    temperature 0 = greedy; top_k 0, top_p 1 and min_p 0 = off. Penalties act on the row's own
    prefix: repetition on prompt + output, presence and frequency on the output alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    seed: int = 0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences never to complete
    grammar: Grammar | None = field(default=None, compare=False)  # of the answer; rules above yield to it

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raises RequestError for the first field out of range."""
        _check_real("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_real("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_real("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_int("seed", self.seed, 0, MAX_SEED)
        if bias := self.logit_bias:  # perhaps of the whole vocabulary
            for token_id in (min(bias), max(bias)):
                _check_int("logit_bias token id", token_id, 0, vocab_size - 1)
            values = np.fromiter(bias.values(), np.float64, len(bias))
            for index in np.flatnonzero(~(values < np.inf))[:1]:
                field = f"logit_bias of token {list(bias)[index]}"
                raise RequestError(field, values[index].item(), "must be a number below +inf")
        _check_words("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_TOKENS, vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One generation. `prompt_ids` [num_prompt_tokens] int64; ids are the model's."""

    request_id: str
    prompt_ids: np.ndarray
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    max_draft_tokens: int | None = None  # per-request cap on speculation; 0 opts out
    draft_ids: tuple[int, ...] = ()  # the client's own draft tokens: verified behind the prompt, first of all
    wants_log_probs: bool = False
    wants_context_logits: bool = False  # of every prompt token; the prompt's KV is then not reused but computed
    wants_context_log_probs: bool = False  # the same, but of each row what log-probabilities tell
    wants_generation_logits: bool = False  # that each output token was drawn from, before processing
    wants_stats: bool = False  # with every output, not with the last one alone
    lora_name: str = ""  # of a loaded adapter
    lora_task_id: int = 0  # of an adapter that a request sent; 0: none
    lora_weights: np.ndarray | None = None  # that adapter, if this request sends it; see core.adapter.read_tensors
    lora_config: np.ndarray | None = None
    guide: str | None = None  # a grammar as text, to be compiled into sampling.grammar before the request is submitted

    def nth(self, index: int) -> Request:
        """Returns a further sequence for the same prompt, with its own id and seed; the 0th is this one."""
        if index == 0:
            return self
        sampling = replace(self.sampling, seed=(self.sampling.seed + index) % (MAX_SEED + 1))
        more = {"lora_weights": None, "lora_config": None}  # the 0th sends them
        return replace(self, request_id=f"{self.request_id}.{index}", sampling=sampling, **more)

    def validate(self, limits: Limits) -> None:
        """Raises RequestError for the first field out of range."""
        ids = self.prompt_ids
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError("input_ids", f"{ids.dtype}{list(ids.shape)}", "must be a 1-D integer array")
        if ids.size == 0:
            raise RequestError("input_ids", [], "prompt is empty; at least 1 token is needed")
        if ids.size >= limits.max_context:
            limit = f"must be below the context length of {limits.max_context} tokens"
            raise RequestError("input_ids length", int(ids.size), limit, code=ErrorCode.TOO_LONG)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= limits.vocab_size:
            bad = low if low < 0 else high
            raise RequestError("input_ids", bad, f"token ids must lie in [0, {limits.vocab_size - 1}]")
        room = limits.max_context - int(ids.size)
        if not 1 <= self.max_tokens <= room:
            raise RequestError(
                "max_tokens",
                self.max_tokens,
                f"must lie in [1, {room}] (context length {limits.max_context} - prompt of {ids.size} tokens)",
                code=ErrorCode.TOO_LONG if self.max_tokens > room else ErrorCode.INVALID,
            )
        for end_id in self.end_ids:
            _check_int("end_id", end_id, 0, limits.vocab_size - 1)
        _check_words("stop_words", self.stop_sequences, MAX_STOP_SEQUENCES, MAX_STOP_TOKENS, limits.vocab_size)
        if self.max_draft_tokens is not None:
            _check_int("num_draft_tokens", self.max_draft_tokens, 0, limits.max_context)
        for token_id in self.draft_ids:
            _check_int("draft_input_ids", token_id, 0, limits.vocab_size - 1)
        if self.guide is not None and not self.end_ids:
            raise RequestError("end_id", None, "an answer with a grammar ends where that does: it needs an end token")
        self.sampling.validate(limits.vocab_size)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the served model. `max_context` counts prompt + output tokens."""

    vocab_size: int
    max_context: int

    def prompt_array(self, token_ids: Sequence[int]) -> np.ndarray:
        """Returns a prompt's ids as int64. Raises RequestError for an id that does not fit."""
        try:
            return np.array(token_ids, np.int64)
        except OverflowError:
            limit = f"token ids must lie in [0, {self.vocab_size - 1}]"
            raise RequestError("input_ids", max(token_ids, key=abs), limit) from None

    def clamp_max_tokens(self, value: int, num_prompt_tokens: int) -> int:
        """Returns value, or the tokens that the context holds behind the prompt if they are fewer but at least 1."""
        room = self.max_context - num_prompt_tokens
        return room if value > room >= 1 else value


@dataclass(slots=True)
class RequestStats:
    """Counters of one request's life; times in nanoseconds of the engine's clock."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    num_allocated_blocks: int = 0  # held at the end, reused ones included
    num_reused_blocks: int = 0
    num_drafted: int = 0
    num_tested: int = 0  # drafted tokens up to the first rejection
    num_accepted: int = 0  # excludes bonus and recovered tokens
    num_pruned: int = 0
    num_steps: int = 0  # verifications that this request took part in
    num_preemptions: int = 0


NUM_CONTEXT_TOP = 5  # alternatives to a token of a prompt


@dataclass(slots=True)
class EngineOutput:
    """New tokens of one request after one step; `finish_reason` is set on the last one."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float] | None = None
    finish_reason: FinishReason | None = None
    error: Failure | None = None  # with finish_reason ERROR
    stats: RequestStats | None = None  # set on the last output, and on every one where the request wants_stats
    context_logits: np.ndarray | None = None  # [num_prompt_tokens, vocab_size] float32, with the first tokens
    # [num_prompt_tokens - 1, 1 + 2 * NUM_CONTEXT_TOP] float32, with the first tokens: of the prompt's next token, the
    # ids of the best (exact below 2^24) and theirs
    context_log_probs: np.ndarray | None = None
    generation_logits: np.ndarray | None = None  # [len(token_ids), vocab_size] float32, where the request wants them
    # What `condense` makes of these: each token's rank, and (token id, log-probability) of the best, the best first.
    alternatives: list[tuple[int, list[tuple[int, float]]]] | None = None

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


def _check_real(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if math.isnan(value) or value > high or value < low or (open_low and value == low):
        raise RequestError(name, value, f"must lie in {'(' if open_low else '['}{low:g}, {high:g}]")


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(name, value, f"must lie in [{low}, {high}]")


def _check_words(
    name: str, words: tuple[tuple[int, ...], ...], max_words: int, max_tokens: int, vocab_size: int
) -> None:
    if len(words) > max_words:
        raise RequestError(name, len(words), f"at most {max_words} are allowed")
    num_tokens = sum(map(len, words))
    if num_tokens > max_tokens:
        raise RequestError(f"{name} length", num_tokens, f"at most {max_tokens} tokens in all are allowed")
    for word in words:
        if not word:
            raise RequestError(name, word, "a word must hold at least 1 token")
        for token_id in word:
            _check_int(f"{name} token id", token_id, 0, vocab_size - 1)
