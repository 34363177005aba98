"""Training data on disk and in batches: conversations that a target wrote, whose states it computes again in training.

A shard is one safetensors file that appears atomically, so that writing can resume and training can read beside it. The
first shards are held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from faser_backend.core.errors import ConfigError
from faser_backend.lab.train_head.target import Target

HELD_OUT_SHARDS = 1
POOL = 2048  # dialogues that are sorted by length together


class Kind(IntEnum):
    """The kind of a token in a conversation."""

    FRAME = 0  # the template's before the first question
    QUESTION = 1  # and what the template puts around later ones
    ANSWER = 2
    GREEDY = 3  # of an answer without chance


@dataclass(frozen=True, slots=True, eq=False)
class Dialogue:
    """One conversation, n tokens."""

    token_ids: np.ndarray  # [n] int32
    kinds: np.ndarray  # [n] int8

    @property
    def num_tokens(self) -> int:
        return self.token_ids.size


def shard_paths(directory: Path) -> list[Path]:
    """Returns the finished shards in the order in which they were written."""
    return sorted(directory.glob("dialogues-*.safetensors"))


def write_shard(directory: Path, index: int, dialogues: list[Dialogue]) -> None:
    path = directory / f"dialogues-{index:05d}.safetensors"
    partial = path.with_suffix(".partial")
    joined = {name: np.concatenate([getattr(d, name) for d in dialogues]) for name in ("token_ids", "kinds")}
    save_file({**joined, "lengths": np.array([d.num_tokens for d in dialogues], np.int32)}, partial)
    partial.replace(path)


def read_shard(path: Path) -> list[Dialogue]:
    """Reads a finished shard. Raises ConfigError if the file is not one."""
    try:
        arrays = load_file(path)
        cuts = np.cumsum(arrays["lengths"])[:-1]
        parts = (np.split(arrays[name], cuts) for name in ("token_ids", "kinds"))
        return list(map(Dialogue, *parts))
    except Exception as error:  # the library raises another class for each cause
        raise ConfigError(f"{path}: not a shard of dialogues ({error})") from None


class Corpus:
    """The shards of a directory that are finished when it is opened."""

    def __init__(self, directory: Path) -> None:
        self.shards = [read_shard(path) for path in shard_paths(directory)]

    @property
    def num_tokens(self) -> int:
        return sum(dialogue.num_tokens for shard in self.shards for dialogue in shard)

    def held_out(self) -> list[Dialogue]:
        return [dialogue for shard in self.shards[:HELD_OUT_SHARDS] for dialogue in shard]

    def frequent_ids(self, vocab_size: int, num_ids: int) -> np.ndarray:
        """Returns the most frequent ids, [num_ids] ascending; ties go to the lowest, which tokenizers learned first."""
        counts = self._counts(self.shards[HELD_OUT_SHARDS:], vocab_size)
        return np.sort(np.argsort(-counts, kind="stable")[:num_ids])

    def unused_id(self, vocab_size: int) -> int:
        """Returns the highest id of no conversation. Raises ConfigError if there is none."""
        unused = np.flatnonzero(self._counts(self.shards, vocab_size) == 0)
        if not unused.size:
            raise ConfigError(f"mask_id: the conversations have all {vocab_size} ids; choose one")
        return int(unused[-1])

    @staticmethod
    def _counts(shards: Sequence[Sequence[Dialogue]], vocab_size: int) -> np.ndarray:
        said = np.concatenate([dialogue.token_ids for shard in shards for dialogue in shard])
        return np.bincount(said, minlength=vocab_size)

    def plan(self, first_shard: int, num_shards: int, tokens_per_step: int, seed: int) -> list[list[tuple[int, int]]]:
        """Returns (shard, dialogue) of each batch of one pass over shards [first_shard, num_shards) without held-out
        ones. Batches hold dialogues of similar length; the seed decides their order."""
        shards = range(max(first_shard, HELD_OUT_SHARDS), num_shards)
        index = [(dialogue.num_tokens, s, d) for s in shards for d, dialogue in enumerate(self.shards[s])]
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
    """B dialogues of up to n tokens, padded at the end, with the target's states, on its device."""

    token_ids: Tensor  # [B, n] int64
    kinds: Tensor  # [B, n] int64
    best_ids: Tensor  # [B, n] int64: the target's most likely token after each one, -1 where it is not learned
    features: Tensor  # [B, n, F * d]
    normed: Tensor  # [B, n, d]: the last layer's output, normed for the logits

    @classmethod
    def of(cls, dialogues: Sequence[Dialogue], target: Target, *, learned: int) -> Batch:
        """Joins dialogues. learned: the lowest kind of the tokens that are learned."""
        size, longest = len(dialogues), max(dialogue.num_tokens for dialogue in dialogues)
        arrays = np.zeros((2, size, longest), np.int64)
        for row, dialogue in enumerate(dialogues):
            arrays[:, row, : dialogue.num_tokens] = dialogue.token_ids, dialogue.kinds
        token_ids, kinds = torch.from_numpy(arrays).to(target.device)
        features, normed, best_ids = target.states(token_ids)
        is_learned = pad(kinds[:, 1:], (0, 1)) >= learned  # by the token that follows
        return cls(token_ids, kinds, torch.where(is_learned, best_ids, -1), features, normed)
