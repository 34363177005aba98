"""Writes the target's own training data: a question, then its answer, many conversations side by side.

Rows go through the engine's runner, in slots with their own blocks; no requests come or go, so nothing is scheduled.
Each row's features stay in the runner's pool until the conversation is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.errors import ConfigError
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.runner import LlvmRunner
from faser_backend.device.partition import CorePartition
from faser_backend.lab.train_head.data import Corpus, Dialogue, shard_paths, write_shard
from faser_backend.lab.train_head.options import HeadOptions
from faser_backend.manifest import EngineManifest
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer

OPENINGS = Path(__file__).with_name("openings.txt")  # beginnings of questions
OPENING_SHARE = 0.8  # of the conversations that begin with one
GREEDY_SHARE = 0.5  # of the answers
MARK = "QUESTION-GOES-HERE"
RAREST = 1e-5  # a token this much less likely than the best one is never drawn
QUESTION_TEMPERATURE, QUESTION_TOP_P, ANSWER_TEMPERATURE = 1.0, 0.95, 0.8


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The token ids that a chat template puts around a question."""

    before: list[int]
    after: list[int]  # up to the start of the answer
    end_ids: frozenset[int]


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation in progress; the target runs one of its tokens at a time."""

    frame: ChatFrame
    options: HeadOptions
    forced: list[int]  # tokens that come next whatever the logits, in reverse order
    is_greedy: bool
    token_ids: list[int] = field(default_factory=list)  # the last one has not run yet
    answer_start: int = 0  # 0 during the question, and if the question never ends
    best_ids: list[int] = field(default_factory=list)  # after each token that ran

    def __post_init__(self) -> None:
        self.token_ids.append(self.forced.pop())

    def advance(self, logits: np.ndarray, rng: np.random.Generator) -> bool:
        """Appends a forced token, or one drawn from logits [vocab_size]. Returns whether it was the last."""
        self.best_ids.append(int(logits.argmax()))
        if not self.forced and self._take(self._drawn(logits, rng)):
            return True
        if self.forced:
            self.token_ids.append(self.forced.pop())
        return False

    def _drawn(self, logits: np.ndarray, rng: np.random.Generator) -> int:
        """Draws a question's token at temperature 1 from the best 95 %."""
        if not self.answer_start:
            return draw(logits, QUESTION_TEMPERATURE, QUESTION_TOP_P, rng)
        return int(logits.argmax()) if self.is_greedy else draw(logits, ANSWER_TEMPERATURE, 1.0, rng)

    def _take(self, token: int) -> bool:
        """Appends a drawn token. It may end the question or, if it returns True, the conversation."""
        frame = self.frame
        is_end = token in frame.end_ids or token == frame.after[0]
        if self.answer_start:
            self.token_ids.append(token)
            return is_end or len(self.token_ids) - self.answer_start >= self.options.max_answer
        num_written = len(self.token_ids) - len(frame.before)
        if is_end and num_written:
            self.forced = list(reversed(frame.after))
            self.answer_start = len(self.token_ids) + len(frame.after)
            return False
        if is_end or num_written + 1 >= self.options.max_question:
            return True
        self.token_ids.append(token)
        return False


class RunnerOfStates(LlvmRunner):
    """A runner that returns the last layer's output with the logits."""

    def run_whole(self, rows: RowBatch) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits [R, vocab_size] and hidden states [R, hidden_size]; the next call overwrites them."""
        results = self._run(0, rows, None, None)
        return results.logits, results.hidden[: rows.logit_rows.size]


class Writer:
    """Writes conversations in `num_slots` slots of an engine, one token of each per step."""

    def __init__(self, engine_dir: Path, feature_layers: tuple[int, ...], options: HeadOptions, run: int) -> None:
        """Opens an engine of runtime llvm with an unsegmented target. run: the number of this run; its draws depend on
        it.

        Raises RequestError if the target has no chat template, ConfigError if a template hides the question.
        """
        manifest = EngineManifest.load(engine_dir)
        self._options, self._rng = options, np.random.default_rng((options.seed, run))
        tokenizer = TextTokenizer.from_file(
            engine_dir / manifest.tokenizer.name, PromptFormat.load(engine_dir, manifest)
        )
        try:
            self._frame = read_frame(manifest, tokenizer)
            texts = [line.replace(r"\n", "\n") for line in OPENINGS.read_text().splitlines()]
            self._openings = [tokenizer.encode(text) for text in texts if text]
        finally:
            tokenizer.close()
        spec = replace(manifest.target.spec, feature_layers=feature_layers)
        num_slots, block_size = options.num_slots, manifest.kv_block_size
        longest = len(self._frame.before) + options.max_question + len(self._frame.after) + options.max_answer
        per_slot = -(-longest // block_size)
        self._tables = np.arange(num_slots * per_slot).reshape(num_slots, per_slot)
        self._pool = KvPool(spec, self._tables.size, block_size, dtype=manifest.kv_cache_dtype)
        self._runner = RunnerOfStates(
            replace(manifest.target, spec=spec),
            engine_dir,
            CorePartition("cores", tuple(sorted(os.sched_getaffinity(0)))),
            self._pool,
            num_threads=options.threads,
        )
        self._hidden = np.zeros((num_slots, per_slot * block_size, spec.hidden_size), np.float16)
        self._slots = [self._open() for _ in range(num_slots)]

    def step(self) -> list[Dialogue]:
        """Runs one token of each conversation. Returns the complete ones."""
        every = np.arange(len(self._slots))
        positions = np.array([len(slot.token_ids) - 1 for slot in self._slots])
        rows = RowBatch(
            token_ids=np.array([slot.token_ids[-1] for slot in self._slots], np.int64),
            cu_rows=np.arange(len(self._slots) + 1),
            context_lens=positions,
            block_tables=self._tables,
            logit_rows=every,
        )
        logits, hidden = self._runner.run_whole(rows)
        self._hidden[every, positions] = hidden
        done: list[Dialogue] = []
        for i, slot in enumerate(self._slots):
            if slot.advance(logits[i], self._rng):
                if slot.answer_start:
                    done.append(self._whole(i))
                self._slots[i] = self._open()  # reuses the blocks of the conversation before
        return done

    def close(self) -> None:
        self._runner.close()

    def _open(self) -> Conversation:
        forced = list(self._frame.before)
        if self._openings and self._rng.random() < OPENING_SHARE:
            forced += self._openings[self._rng.integers(len(self._openings))]
        is_greedy = bool(self._rng.random() < GREEDY_SHARE)
        return Conversation(self._frame, self._options, list(reversed(forced)), is_greedy)

    def _whole(self, index: int) -> Dialogue:
        """Returns the tokens that ran, without the last one, which was drawn only."""
        slot, table = self._slots[index], self._tables[index]
        n = len(slot.best_ids)
        features = [pool[table].reshape(-1, pool.shape[-1])[:n] for pool in self._pool.features.values()]
        return Dialogue(
            token_ids=np.array(slot.token_ids[:n], np.int32),
            best_ids=np.array(slot.best_ids, np.int32),
            features=np.concatenate(features, axis=1).astype(np.float16),
            hidden=self._hidden[index, :n].copy(),
            question_start=len(self._frame.before),
            answer_start=slot.answer_start,
            is_greedy=slot.is_greedy,
        )


def read_frame(manifest: EngineManifest, tokenizer: TextTokenizer) -> ChatFrame:
    """Reads the chat template's frame. Raises RequestError if there is none, ConfigError if it hides the question."""
    text, _ = tokenizer.encode_chat("chat template", json.dumps([{"role": "user", "content": MARK}]))
    before, mark, after = text.partition(MARK)
    if not (mark and before and after):
        raise ConfigError("the chat template adds no tokens around a question, so the target cannot write one")
    return ChatFrame(tokenizer.encode(before), tokenizer.encode(after), frozenset(manifest.end_ids))


def draw(logits: np.ndarray, temperature: float, top_p: float, rng: np.random.Generator) -> int:
    """Draws an index of logits [K] from the smallest set of best ones that holds top_p of the probability."""
    best = logits.max()
    ids = np.flatnonzero(logits >= best + temperature * np.log(RAREST))  # sorting all of V would cost more than the row
    weights = np.exp((logits[ids] - best).astype(np.float64) / temperature)
    order = np.argsort(-weights)
    shares = np.cumsum(weights[order]) / weights.sum()
    shares = shares[: int(np.searchsorted(shares, top_p)) + 1]
    return int(ids[order[min(np.searchsorted(shares, rng.random() * shares[-1], side="right"), shares.size - 1)]])


def write_dialogues(
    options: HeadOptions, engine_dir: Path, feature_layers: tuple[int, ...], on_tokens: Callable[[int], None]
) -> None:
    """Adds shards until there are num_tokens. on_tokens: called with the total after each shard.

    An interrupted run loses its unfinished shard.
    """
    directory = options.dialogues
    directory.mkdir(parents=True, exist_ok=True)
    total, next_index = Corpus(directory).num_tokens, len(shard_paths(directory))
    if total >= options.tokens:
        return
    done: list[Dialogue] = []
    with closing(Writer(engine_dir, feature_layers, options, next_index)) as writer:
        while total < options.tokens:
            done += writer.step()
            if len(done) >= options.dialogues_per_shard:
                write_shard(directory, next_index, done)
                total += sum(dialogue.num_tokens for dialogue in done)
                next_index, done = next_index + 1, []
                on_tokens(total)
