"""Training data on disk and in batches: dialogues that a target wrote, with its states of each token.

A shard is one safetensors file that appears atomically, so that writing can resume and training can read beside it. The
first shards are held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from faser_backend.core.errors import ConfigError

HELD_OUT_SHARDS = 1
POOL = 256  # dialogues that are sorted by length together
ARRAYS = ("token_ids", "best_ids", "features", "hidden")


@dataclass(frozen=True, slots=True, eq=False)
class Dialogue:
    """One conversation with the target's states: prompt and answer, n tokens."""

    token_ids: np.ndarray  # [n] int32
    best_ids: np.ndarray  # [n] int32: the target's most likely token after each one
    features: np.ndarray  # [n, num_features * hidden_size] float16: inputs of some layers, side by side
    hidden: np.ndarray  # [n, hidden_size] float16: output of the last layer, before the norm
    question_start: int  # after the chat template's tokens before a question
    answer_start: int
    is_greedy: bool  # whether the answer was drawn greedily

    @property
    def num_tokens(self) -> int:
        return self.token_ids.size


def shard_paths(directory: Path) -> list[Path]:
    """Returns the finished shards in the order in which they were written."""
    return sorted(directory.glob("dialogues-*.safetensors"))


def write_shard(directory: Path, index: int, dialogues: list[Dialogue]) -> None:
    path = directory / f"dialogues-{index:05d}.safetensors"
    partial = path.with_suffix(".partial")
    joined = {name: np.concatenate([getattr(d, name) for d in dialogues]) for name in ARRAYS}
    numbers = [[d.num_tokens, d.question_start, d.answer_start, d.is_greedy] for d in dialogues]
    save_file({**joined, "dialogues": np.array(numbers, np.int32)}, partial)
    partial.replace(path)


class Shard:
    """A finished shard, whose arrays are read from the file on demand."""

    def __init__(self, path: Path) -> None:
        """Opens a shard. Raises ConfigError if the file is not one."""
        try:
            self._file = safe_open(path, "np")
            self.numbers = self._file.get_tensor("dialogues")  # [num_dialogues, 4]
            self.token_ids = self._file.get_tensor("token_ids")  # of all dialogues, concatenated
        except Exception as error:  # the library raises another class for each cause
            raise ConfigError(f"{path}: not a shard of dialogues ({error})") from None
        self._starts = np.concatenate([[0], np.cumsum(self.numbers[:, 0])])

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Dialogue:
        rows = slice(int(self._starts[index]), int(self._starts[index + 1]))
        _, question_start, answer_start, is_greedy = self.numbers[index].tolist()
        return Dialogue(
            **{name: self._file.get_slice(name)[rows] for name in ARRAYS},
            question_start=question_start,
            answer_start=answer_start,
            is_greedy=bool(is_greedy),
        )


class Corpus:
    """The shards of a directory that are finished when it is opened."""

    def __init__(self, directory: Path) -> None:
        self.shards = [Shard(path) for path in shard_paths(directory)]

    @property
    def num_tokens(self) -> int:
        return sum(shard.token_ids.size for shard in self.shards)

    def held_out(self) -> list[Dialogue]:
        return [shard[i] for shard in self.shards[:HELD_OUT_SHARDS] for i in range(len(shard))]

    def frequent_ids(self, vocab_size: int, num_ids: int) -> np.ndarray:
        """Returns the most frequent ids, [num_ids] ascending; ties go to the lowest, which tokenizers learned first."""
        said = np.concatenate([shard.token_ids for shard in self.shards[HELD_OUT_SHARDS:]])
        counts = np.bincount(said, minlength=vocab_size)
        return np.sort(np.argsort(-counts, kind="stable")[:num_ids])

    def plan(self, first_shard: int, num_shards: int, tokens_per_step: int, seed: int) -> list[list[tuple[int, int]]]:
        """Returns (shard, dialogue) of each batch of one pass over shards [first_shard, num_shards) without held-out
        ones. Batches hold dialogues of similar length; the seed decides their order."""
        shards = range(max(first_shard, HELD_OUT_SHARDS), num_shards)
        index = [(int(n), s, d) for s in shards for d, n in enumerate(self.shards[s].numbers[:, 0])]
        rng = np.random.default_rng(seed)
        shuffled = [index[i] for i in rng.permutation(len(index))]
        batches: list[list[tuple[int, int]]] = []
        for first in range(0, len(shuffled), POOL):
            current: list[tuple[int, int]] = []
            for num_tokens, shard, dialogue in sorted(shuffled[first : first + POOL]):
                if current and (len(current) + 1) * num_tokens > tokens_per_step:
                    batches.append(current)
                    current = []
                current.append((shard, dialogue))
            batches.append(current)
        return [batches[i] for i in rng.permutation(len(batches))]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B dialogues of up to n tokens, padded at the end; features and hidden as in Dialogue."""

    token_ids: Tensor  # [B, n] int64
    best_ids: Tensor  # [B, n] int64, -1 where the next token is not learned
    features: Tensor  # [B, n, F * d]
    hidden: Tensor  # [B, n, d]

    @classmethod
    def of(cls, dialogues: Sequence[Dialogue], *, has_questions: bool) -> Batch:
        """Joins dialogues. has_questions: learns the target's tokens in questions too, as it wrote them itself."""
        size, longest = len(dialogues), max(dialogue.num_tokens for dialogue in dialogues)
        token_ids = np.zeros((size, longest), np.int64)
        best_ids = np.full((size, longest), -1, np.int64)
        features = np.zeros((size, longest, dialogues[0].features.shape[1]), np.float16)
        hidden = np.zeros((size, longest, dialogues[0].hidden.shape[1]), np.float16)
        for row, dialogue in enumerate(dialogues):
            n, first = dialogue.num_tokens, (dialogue.question_start if has_questions else dialogue.answer_start) - 1
            token_ids[row, :n] = dialogue.token_ids
            best_ids[row, first:n] = dialogue.best_ids[first:]
            features[row, :n], hidden[row, :n] = dialogue.features, dialogue.hidden
        return cls(*map(torch.from_numpy, (token_ids, best_ids, features, hidden)))
