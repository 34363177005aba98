"""How conversations come about, whatever runs the target: how they begin and end, and how their tokens are drawn."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

import numpy as np

from faser_backend.core.errors import ConfigError
from faser_backend.manifest import EngineManifest
from faser_backend.serving.prompts import PromptFormat
from faser_backend.serving.tokenizer import TextTokenizer
from lab.train_head.shards import Dialogue

OPENINGS = Path(__file__).with_name("openings.txt")
MARK = "QUESTION-GOES-HERE"
RAREST = 1e-5  # a token this much less likely than the best one is never drawn
QUESTION_TEMPERATURE, QUESTION_TOP_P = 1.0, 0.95


@dataclass(frozen=True, slots=True)
class WritingOptions:
    """How conversations are drawn. num_slots: written side by side, 0 for what suits the writer; openings: beginnings
    of questions, for the given share of conversations."""

    seed: int = 0
    num_slots: int = 0
    num_threads: int | None = None
    dialogues_per_shard: int = 64
    max_question: int = 192
    max_answer: int = 256
    answer_temperature: float = 0.8
    greedy_share: float = 0.5
    opening_share: float = 0.8
    openings: Path = OPENINGS


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """What a chat template puts around a question."""

    before: list[int]
    after: list[int]  # up to where the answer begins
    end_ids: frozenset[int]


def read_frame(manifest: EngineManifest, tokenizer: TextTokenizer) -> ChatFrame:
    """Raises RequestError where the target has no chat template, ConfigError where a template hides the question."""
    text, _ = tokenizer.encode_chat("chat template", json.dumps([{"role": "user", "content": MARK}]))
    before, mark, after = text.partition(MARK)
    if not (mark and before and after):
        raise ConfigError("the chat template puts nothing around a question: the target cannot write one itself")
    return ChatFrame(tokenizer.encode(before), tokenizer.encode(after), frozenset(manifest.end_ids))


class State(Enum):
    """Of a conversation."""

    OPEN = auto()
    DONE = auto()
    DROPPED = auto()  # a question without end, or none


@dataclass(slots=True, eq=False)
class Conversation:
    """One that is being written; its target runs one token of it at a time."""

    frame: ChatFrame
    options: WritingOptions
    forced: list[int]  # tokens that come next whatever the target says, the last one first
    is_greedy: bool
    token_ids: list[int] = field(default_factory=list)  # the last one is to be run
    answer_start: int = 0  # 0 while the question is written
    best_ids: list[int] = field(default_factory=list)  # behind each token that was run

    def advance(self, logits: np.ndarray, ids: np.ndarray | None, rng: np.random.Generator) -> State:
        """The next token enters: a forced one, or one of logits [K] of `ids` [K], of all ids where None."""
        best = int(logits.argmax())
        self.best_ids.append(best if ids is None else int(ids[best]))
        if not self.forced:
            token = self._drawn(logits, rng)
            state = self._take(token if ids is None else int(ids[token]))
            if state is not State.OPEN:
                return state
        self.feed()
        return State.OPEN

    def feed(self) -> None:
        if self.forced:
            self.token_ids.append(self.forced.pop())

    def dialogue(self, features: np.ndarray, hidden: np.ndarray) -> Dialogue:
        """What was written, of features [n, F * d] and hidden [n, d] of the n tokens that were run.

        The last token was drawn and not run, and is left out.
        """
        return Dialogue(
            token_ids=np.array(self.token_ids[: len(self.best_ids)], np.int32),
            best_ids=np.array(self.best_ids, np.int32),
            features=features,
            hidden=hidden,
            question_start=len(self.frame.before),
            answer_start=self.answer_start,
            is_greedy=self.is_greedy,
        )

    def _drawn(self, logits: np.ndarray, rng: np.random.Generator) -> int:
        """Where the next token is in logits. A question is drawn at temperature 1 from the best 95 %."""
        if not self.answer_start:
            return draw(logits, QUESTION_TEMPERATURE, QUESTION_TOP_P, rng)
        return int(logits.argmax()) if self.is_greedy else draw(logits, self.options.answer_temperature, 1.0, rng)

    def _take(self, token: int) -> State:
        """A drawn token enters, ends the question or ends the conversation."""
        frame, options = self.frame, self.options
        is_end = token in frame.end_ids or token == frame.after[0]
        if self.answer_start:
            self.token_ids.append(token)
            is_done = is_end or len(self.token_ids) - self.answer_start >= options.max_answer
            return State.DONE if is_done else State.OPEN
        num_written = len(self.token_ids) - len(frame.before)
        if is_end and num_written:
            self.forced = list(reversed(frame.after))
            self.answer_start = len(self.token_ids) + len(frame.after)
        elif is_end or num_written + 1 >= options.max_question:
            return State.DROPPED
        else:
            self.token_ids.append(token)
        return State.OPEN


class Opener:
    """Opens conversations of one target."""

    def __init__(self, engine_dir: Path, options: WritingOptions, rng: np.random.Generator) -> None:
        """engine_dir: its tokenizer and chat template are read. Raises ConfigError, RequestError."""
        manifest = EngineManifest.load(engine_dir)
        tokenizer = TextTokenizer.from_file(
            engine_dir / manifest.tokenizer.name, PromptFormat.load(engine_dir, manifest)
        )
        try:
            self.frame = read_frame(manifest, tokenizer)
            texts = [line.replace(r"\n", "\n") for line in options.openings.read_text().splitlines()]
            self._openings = [tokenizer.encode(text) for text in texts if text]
        finally:
            tokenizer.close()
        self._options, self._rng = options, rng

    @property
    def max_tokens(self) -> int:
        """The longest conversation that there can be."""
        options, frame = self._options, self.frame
        return len(frame.before) + options.max_question + len(frame.after) + options.max_answer

    def open(self) -> Conversation:
        """A new conversation; its first token is to be run."""
        options, rng = self._options, self._rng
        forced = list(self.frame.before)
        if self._openings and rng.random() < options.opening_share:
            forced += self._openings[rng.integers(len(self._openings))]
        is_greedy = bool(rng.random() < options.greedy_share)
        conversation = Conversation(self.frame, options, list(reversed(forced)), is_greedy)
        conversation.feed()
        return conversation


def draw(logits: np.ndarray, temperature: float, top_p: float, rng: np.random.Generator) -> int:
    """One place in logits [K]: from the smallest set of best ones that holds top_p of the probability."""
    best = logits.max()
    ids = np.flatnonzero(logits >= best + temperature * np.log(RAREST))  # sorting all of V would cost more than the row
    weights = np.exp((logits[ids] - best).astype(np.float64) / temperature)
    order = np.argsort(-weights)
    shares = np.cumsum(weights[order]) / weights.sum()
    num_kept = int(np.searchsorted(shares, top_p)) + 1
    shares = shares[:num_kept]
    return int(ids[order[min(np.searchsorted(shares, rng.random() * shares[-1], side="right"), shares.size - 1)]])
