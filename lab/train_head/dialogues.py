"""The target writes its own training data: a question, then its answer, many conversations side by side.

Rows go through the engine's own runner, in slots with blocks of their own: no request comes or goes, so
there is nothing to schedule. Each row's features stay in the runner's pool until the conversation is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.errors import ConfigError
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.llvm_runner import LlvmRunner
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import EngineManifest
from faser_backend.serving.prompts import PromptFormat
from faser_backend.serving.tokenizer import TextTokenizer
from lab.train_head.shards import Corpus, Dialogue, shard_paths, write_shard

OPENINGS = Path(__file__).with_name("openings.txt")
MARK = "QUESTION-GOES-HERE"
RAREST = 1e-5  # a token this much less likely than the best one is never drawn


@dataclass(frozen=True, slots=True)
class WritingOptions:
    """How conversations are drawn. openings: beginnings of questions, for the given share of conversations."""

    seed: int = 0
    num_slots: int = 64
    num_threads: int | None = None
    dialogues_per_shard: int = 64
    max_question: int = 192
    max_answer: int = 256
    answer_temperature: float = 0.8
    greedy_share: float = 0.5
    opening_share: float = 0.4
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


class RunnerOfStates(LlvmRunner):
    """A runner that gives the last layer's output beside the logits."""

    def run_whole(self, rows: RowBatch) -> tuple[np.ndarray, np.ndarray]:
        """Logits [R, vocab_size] and hidden states [R, hidden_size], in buffers that the next call overwrites."""
        results = self._run(0, rows, None, None)
        return results.logits, results.hidden[: rows.logit_rows.size]


@dataclass(slots=True, eq=False)
class _Slot:
    """A conversation that is being written."""

    forced: list[int]  # tokens that come next whatever the target says, the last one first
    is_greedy: bool
    token_ids: list[int] = field(default_factory=list)
    answer_start: int = 0  # 0 while the question is written
    best_ids: list[int] = field(default_factory=list)


class DialogueWriter:
    """Writes conversations in `num_slots` slots, one token of each per call."""

    def __init__(self, engine_dir: Path, feature_layers: tuple[int, ...], options: WritingOptions, seed: int) -> None:
        """engine_dir: of runtime llvm, its target uncut. seed: of this run. Raises ConfigError, RequestError."""
        manifest = EngineManifest.load(engine_dir)
        tokenizer = TextTokenizer.from_file(
            engine_dir / manifest.tokenizer.name, PromptFormat.load(engine_dir, manifest)
        )
        try:
            self._frame = read_frame(manifest, tokenizer)
            texts = [line.encode().decode("unicode_escape") for line in options.openings.read_text().splitlines()]
            self._openings = [tokenizer.encode(text) for text in texts if text]
        finally:
            tokenizer.close()
        self._options, self._rng = options, np.random.default_rng((options.seed, seed))
        spec = replace(manifest.target.spec, feature_layers=feature_layers)
        longest = len(self._frame.before) + options.max_question + len(self._frame.after) + options.max_answer
        block_size = manifest.kv_block_size
        per_slot = -(-longest // block_size)
        self._tables = np.arange(options.num_slots * per_slot).reshape(options.num_slots, per_slot)
        self._pool = KvPool(spec, self._tables.size, block_size, dtype=manifest.kv_cache_dtype)
        cores = tuple(sorted(os.sched_getaffinity(0)))
        self._runner = RunnerOfStates(
            replace(manifest.target, spec=spec),
            engine_dir,
            CorePartition("cores", cores),
            self._pool,
            num_threads=min(options.num_threads or len(cores), len(cores)),
        )
        self._hidden = np.zeros((options.num_slots, per_slot * block_size, spec.hidden_size), np.float16)
        self._slots = [self._open(slot) for slot in range(options.num_slots)]

    def step(self) -> list[Dialogue]:
        """Runs one token of each conversation; returns those that ended."""
        for slot in self._slots:
            if slot.forced:
                slot.token_ids.append(slot.forced.pop())
        num_slots = len(self._slots)
        lengths = np.array([len(slot.token_ids) for slot in self._slots])
        every = np.arange(num_slots)
        rows = RowBatch(
            token_ids=np.array([slot.token_ids[-1] for slot in self._slots], np.int64),
            cu_rows=np.arange(num_slots + 1),
            context_lens=lengths - 1,
            block_tables=self._tables,
            logit_rows=every,
        )
        logits, hidden = self._runner.run_whole(rows)
        self._hidden[every, lengths - 1] = hidden
        for slot, best in zip(self._slots, logits.argmax(axis=1).tolist(), strict=True):
            slot.best_ids.append(best)
        free = [i for i, slot in enumerate(self._slots) if not slot.forced]
        return [done for i in free if (done := self._take(i, self._drawn(self._slots[i], logits[i])))]

    def close(self) -> None:
        self._runner.close()

    def _drawn(self, slot: _Slot, logits: np.ndarray) -> int:
        """The next token of a conversation. A question is drawn at temperature 1 from the best 95 %."""
        if not slot.answer_start:
            return draw(logits, 1.0, 0.95, self._rng)
        return slot.best_ids[-1] if slot.is_greedy else draw(logits, self._options.answer_temperature, 1.0, self._rng)

    def _take(self, index: int, token: int) -> Dialogue | None:
        """A drawn token enters its conversation, ends its question or ends it."""
        slot, frame, options = self._slots[index], self._frame, self._options
        is_end = token in frame.end_ids or token == frame.after[0]
        if slot.answer_start:
            slot.token_ids.append(token)
            if not is_end and len(slot.token_ids) - slot.answer_start < options.max_answer:
                return None
            dialogue = self._whole(index)
            self._replace(index)
            return dialogue
        num_written = len(slot.token_ids) - len(frame.before)
        if is_end and num_written:
            slot.forced = list(reversed(frame.after))
            slot.answer_start = len(slot.token_ids) + len(frame.after)
        elif is_end or num_written + 1 >= options.max_question:
            self._replace(index)  # a question without end, or none
        else:
            slot.token_ids.append(token)
        return None

    def _whole(self, index: int) -> Dialogue:
        """What was written in a slot; the last token was drawn and not run, and is left out."""
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

    def _open(self, index: int) -> _Slot:
        """A new conversation; it writes over the blocks of the one before."""
        options, rng = self._options, self._rng
        forced = list(self._frame.before)
        if self._openings and rng.random() < options.opening_share:
            forced += self._openings[rng.integers(len(self._openings))]
        return _Slot(list(reversed(forced)), is_greedy=bool(rng.random() < options.greedy_share))

    def _replace(self, index: int) -> None:
        self._slots[index] = self._open(index)


def draw(logits: np.ndarray, temperature: float, top_p: float, rng: np.random.Generator) -> int:
    """One token of logits [V]: from the smallest set of best tokens that holds top_p of the probability."""
    best = logits.max()
    ids = np.flatnonzero(logits >= best + temperature * np.log(RAREST))  # sorting all of V would cost more than the row
    weights = np.exp((logits[ids] - best).astype(np.float64) / temperature)
    order = np.argsort(-weights)
    shares = np.cumsum(weights[order]) / weights.sum()
    num_kept = int(np.searchsorted(shares, top_p)) + 1
    shares = shares[:num_kept]
    return int(ids[order[min(np.searchsorted(shares, rng.random() * shares[-1], side="right"), shares.size - 1)]])


def write_dialogues(
    engine_dir: Path,
    directory: Path,
    feature_layers: tuple[int, ...],
    *,
    num_tokens: int,
    options: WritingOptions,
    on_tokens: Callable[[int], None],
) -> None:
    """Adds shards to a directory until it holds num_tokens. on_tokens is told how many there are, after each shard.

    What was begun when a run is cut off is lost: less than a shard, and what lies in slots.
    """
    directory.mkdir(parents=True, exist_ok=True)
    total, next_index = Corpus(directory).num_tokens, len(shard_paths(directory))
    if total >= num_tokens:
        return
    writer = DialogueWriter(engine_dir, feature_layers, options, seed=next_index)
    done: list[Dialogue] = []
    try:
        while total < num_tokens:
            done += writer.step()
            if len(done) >= options.dialogues_per_shard:
                write_shard(directory, next_index, done)
                total += sum(dialogue.num_tokens for dialogue in done)
                next_index, done = next_index + 1, []
                on_tokens(total)
    finally:
        writer.close()
