"""Writes the target's own training data: questions and answers, many conversations side by side, on a CPU or a GPU.

Each slot holds one conversation after the other. All slots advance by one token a step, in a few operations over all of
them, so that a GPU replays a step as one graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from faser_backend.core.errors import ConfigError
from faser_backend.engines.pairs import open_pair
from faser_backend.engines.tokenizer_files import write_tokenizer
from faser_backend.lab.train_head.data import Corpus, Dialogue, Kind, shard_paths, write_shard
from faser_backend.lab.train_head.options import HeadOptions
from faser_backend.lab.train_head.target import Target
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer

OPENINGS = Path(__file__).with_name("openings.txt")  # beginnings of questions; those with {} surround an earlier answer
NUM_BEGINNINGS = 1024  # drawn again each round
PLAIN_SHARE, PASSAGE_SHARE = 0.12, 0.48  # of conversations without an opening, and of those about an earlier answer
GREEDY_SHARE, AGAIN_SHARE = 0.5, 0.5  # of the answers; of the first answers that a second question follows
PASSAGE, NUM_PASSAGES = range(24, 200), 100_000
MARKS = ("FIRST-QUESTION-GOES-HERE", "ANSWER-GOES-HERE", "SECOND-QUESTION-GOES-HERE")
RAREST = 1e-5  # an answer's token this much less likely than the best one is never drawn
RAREST_IN_QUESTION = 0.02
ANSWER_TEMPERATURE = 0.8  # a question's is 1
STEP_OF_LENGTH = 128  # cached positions that a step attends to are a multiple


class ChatFrame:
    """The token ids that a chat template puts around questions and answers, and the openings of questions."""

    def __init__(self, target: Path) -> None:
        """Raises ConfigError if there is no chat template, or it hides the question."""
        pair = open_pair(target, None, None, lambda name: None)
        if pair.prompts.chat_template is None:
            raise ConfigError(f"target = {target}: has no chat template (chat_template.jinja) to ask questions with")
        self.end_ids = list(pair.end_ids)
        with TemporaryDirectory(prefix="faser-tokenizer-") as folder:
            file, *_ = write_tokenizer(pair.tokenizer, pair.prompts, pair.end_ids, 1, Path(folder))
            prompts = PromptFormat(pair.prompts.chat_template, pair.prompts.special_tokens)
            tokenizer = TextTokenizer.from_file(file, prompts)
        try:
            roles = ("user", "assistant", "user")
            messages = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=True)]
            before, mark, after = tokenizer.encode_chat("chat template", messages[:1])[0].partition(MARKS[0])
            if not (mark and before and after):
                raise ConfigError("the chat template adds no tokens around a question, so the target cannot write one")
            second = tokenizer.encode_chat("chat template", messages)[0].partition(MARKS[1])[2].partition(MARKS[2])[0]
            self.before, self.after, between = map(tokenizer.encode, (before, after, second))
            # The answer's end is the target's own; a template without a second question gets none.
            self.between = between[1:] if between and between[0] in self.end_ids else []
            lines = [line.replace(r"\n", "\n") for line in OPENINGS.read_text().splitlines() if line]
            self.openings = [tokenizer.encode(line) for line in lines if "{}" not in line]
            self.around = [[tokenizer.encode(part) for part in line.split("{}")] for line in lines if "{}" in line]
        finally:
            tokenizer.close()

    def beginnings(self, passages: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
        """Draws the forced beginnings of conversations. passages: earlier answers."""
        found: list[list[int]] = []
        for kind in rng.random(NUM_BEGINNINGS):
            opening: list[int] = []
            if kind < PASSAGE_SHARE and passages:
                first, last = self.around[rng.integers(len(self.around))]
                opening = first + passages[rng.integers(len(passages))] + last
            elif kind < 1 - PLAIN_SHARE:
                opening = self.openings[rng.integers(len(self.openings))]
            found.append(self.before + opening)
        return found


class Writer:
    """Writes conversations in num_slots slots of a target, a round of options.round_tokens tokens each at a time.

    All state is in tensors [num_slots] on the target's device, which steps change in place.
    """

    def __init__(self, target: Target, frame: ChatFrame, options: HeadOptions) -> None:
        self._target, self._frame, self._options, device = target, frame, options, target.device
        size, length = options.num_slots, options.round_tokens
        self._script_width = max(len(frame.after), len(frame.between), len(frame.before) + PASSAGE.stop + 64)
        # Forced tokens: the beginnings, then what follows a question, then what precedes a second one; -1: none
        self._scripts = torch.full((NUM_BEGINNINGS + 2, self._script_width), -1, device=device)
        self._is_end = torch.zeros(target.spec.vocab_size, dtype=torch.bool, device=device)
        self._is_end[[*frame.end_ids]] = True
        shape = (size, target.spec.num_kv_heads, length, target.spec.head_dim)
        self._keys, self._values = (
            [torch.zeros(shape, dtype=target.dtype, device=device) for _ in range(target.spec.num_layers)]
            for _ in range(2)
        )

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._at = numbers()  # the position of the token that runs
        self._tokens, self._starts, self._kinds = (numbers(size, length + 1) for _ in range(3))
        self._start = numbers(size)  # of the conversation
        self._script, self._index = numbers(size), numbers(size)  # of the forced token that comes next
        self._drawn = numbers(size)  # tokens of the question or answer
        self._kind = numbers(size)  # of the tokens that are drawn next
        self._is_second = numbers(size)  # whether the question is the conversation's second
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def round(
        self, passages: list[list[int]], rng: np.random.Generator, on_tokens: Callable[[int], None]
    ) -> list[Dialogue]:
        """Writes one round. Returns the conversations with an answer; the last of a slot may lack its end.

        on_tokens: called with the tokens of the round so far.
        """
        torch.manual_seed(int(rng.integers(2**31)))
        self._scripts.fill_(-1)
        rows = [*self._frame.beginnings(passages, rng), self._frame.after, self._frame.between]
        for row, tokens in zip(self._scripts, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens[: self._script_width], device=row.device)
        for state in (self._at, self._start, self._index, self._drawn, self._is_second):
            state.zero_()
        self._kind.fill_(Kind.QUESTION)
        self._script.random_(NUM_BEGINNINGS)
        self._tokens[:, 0] = self._scripts[self._script, 0]
        self._starts[:, 0], self._kinds[:, 0] = 0, Kind.FRAME
        self._index.fill_(1)
        length = self._options.round_tokens
        for step in range(length):
            self._advance(min(length, (step // STEP_OF_LENGTH + 1) * STEP_OF_LENGTH))
            on_tokens((step + 1) * self._options.num_slots)
        tokens, starts, kinds = (x[:, :length].cpu().numpy() for x in (self._tokens, self._starts, self._kinds))
        found: list[Dialogue] = []
        for slot in range(len(tokens)):
            cuts = np.flatnonzero(np.diff(starts[slot])) + 1
            for ids, own in zip(np.split(tokens[slot], cuts), np.split(kinds[slot], cuts), strict=True):
                if (own >= Kind.ANSWER).any():
                    found.append(Dialogue(ids.astype(np.int32), own.astype(np.int8)))
        return found

    def _advance(self, length: int) -> None:
        if self._target.device.type == "cpu":
            self._step(length)
            return
        if length not in self._graphs:
            states = [x for x in vars(self).values() if isinstance(x, Tensor)]
            kept = [x.clone() for x in states]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(length)  # libraries set themselves up outside of the capture
            torch.cuda.current_stream().wait_stream(stream)
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            self._graphs[length] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[length], pool=pool):
                self._step(length)
            for state, old in zip(states, kept, strict=True):
                state.copy_(old)
        self._graphs[length].replay()

    @torch.no_grad()
    def _step(self, length: int) -> None:
        """Runs one token of each slot over `length` cached positions, and decides on the next."""
        at, frame, options = self._at, self._frame, self._options
        logits = self._logits(length)
        best, is_answer = logits.argmax(-1), self._kind >= Kind.ANSWER
        drawn = torch.where(self._kind == Kind.GREEDY, best, draw(logits, is_answer))
        forced = self._scripts[self._script, self._index.clamp(max=self._script_width - 1)]
        forced = torch.where(self._index < self._script_width, forced, -1)
        is_forced = forced >= 0
        counts = torch.where(is_forced, 0, self._drawn + 1)
        is_said = self._is_end[drawn] | (~is_answer & (drawn == frame.after[0]))
        limit = torch.where(is_answer, options.max_answer, options.max_question)
        ends = ~is_forced & (is_said | (counts >= limit))
        token = torch.where(is_forced, forced, torch.where(ends & ~is_said, frame.end_ids[0], drawn))
        token = torch.where(ends & ~is_answer, frame.after[0], token)
        is_new = is_forced & (self._script < NUM_BEGINNINGS) & (self._index == 0)
        self._start.copy_(torch.where(is_new, at + 1, self._start))
        in_frame = (self._script < NUM_BEGINNINGS) & (self._index < len(frame.before))
        kind = torch.where(is_forced, torch.where(in_frame, Kind.FRAME, Kind.QUESTION), self._kind)
        place = (at + 1).view(1)
        for table, value in ((self._tokens, token), (self._starts, self._start), (self._kinds, kind)):
            table.index_copy_(1, place, value[:, None])

        chance = torch.rand(3, len(token), device=token.device)
        asks_again = is_said & (self._is_second == 0) & (chance[0] < AGAIN_SHARE) & bool(frame.between)
        beginning = (chance[1] * NUM_BEGINNINGS).long()
        follows = torch.where(asks_again, NUM_BEGINNINGS + 1, beginning)
        self._script.copy_(torch.where(ends, torch.where(is_answer, follows, NUM_BEGINNINGS), self._script))
        self._index.copy_(torch.where(ends, (~is_answer).long(), self._index + 1))  # a question's end was after[0]
        answers = torch.where(chance[2] < GREEDY_SHARE, Kind.GREEDY, Kind.ANSWER)
        self._kind.copy_(torch.where(ends, torch.where(is_answer, Kind.QUESTION, answers), self._kind))
        self._is_second.copy_(torch.where(ends & is_answer, asks_again.long(), self._is_second))
        self._drawn.copy_(torch.where(ends, 0, counts))
        at.add_(1)

    def _logits(self, length: int) -> Tensor:
        spec, at, place = self._target.spec, self._at, self._at.view(1)
        heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
        every = torch.arange(length, device=at.device)
        is_seen = (every >= self._start[:, None]) & (every <= at)
        bias = torch.zeros(is_seen.shape, dtype=self._target.dtype, device=at.device).masked_fill_(~is_seen, -math.inf)
        bias = bias[:, None, None].expand(-1, heads[0], heads[1], -1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys.index_copy_(2, place, k)
            values.index_copy_(2, place, v)
            together = q.reshape(-1, *heads)  # the heads that share a key as rows
            mixed = scaled_dot_product_attention(together, keys[:, :, :length], values[:, :, :length], attn_mask=bias)
            return mixed.reshape(q.shape)

        return self._target.step(self._tokens.index_select(1, place)[:, 0], at - self._start, attend).float()


def draw(logits: Tensor, is_answer: Tensor) -> Tensor:
    """Draws tokens from logits [B, K] by the Gumbel trick, none of them rare. is_answer [B]: as in an answer."""
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled = torch.where(is_answer[:, None], scaled / ANSWER_TEMPERATURE, scaled)
    rarest = torch.where(is_answer, math.log(RAREST), math.log(RAREST_IN_QUESTION))
    scaled.masked_fill_(scaled < rarest[:, None], -math.inf)
    return (scaled - torch.empty_like(scaled).exponential_().log_()).argmax(-1)


def write_dialogues(options: HeadOptions, target: Target, on_tokens: Callable[[int], None]) -> None:
    """Adds shards until there are options.tokens. on_tokens: called with the total after each step.

    An interrupted run loses its unfinished round.
    """
    directory = options.dialogues
    directory.mkdir(parents=True, exist_ok=True)
    total, next_index = Corpus(directory).num_tokens, len(shard_paths(directory))
    if total >= options.tokens:
        return
    writer, rng = Writer(target, ChatFrame(options.target), options), np.random.default_rng((options.seed, next_index))
    passages: list[list[int]] = []
    while total < options.tokens:
        made = writer.round(passages, rng, lambda count, before=total: on_tokens(before + count))
        texts = [dialogue.token_ids[dialogue.kinds >= Kind.ANSWER] for dialogue in made]
        passages += [ids[: PASSAGE.stop].tolist() for ids in texts if ids.size >= PASSAGE.start]
        del passages[:-NUM_PASSAGES]
        for first in range(0, len(made), options.dialogues_per_shard):
            write_shard(directory, next_index, made[first : first + options.dialogues_per_shard])
            next_index += 1
        total += sum(dialogue.num_tokens for dialogue in made)
