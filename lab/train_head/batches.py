"""Batches of dialogues of like length, in an order that a seed and a pass decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lab.train_head.shards import Corpus, Dialogue

POOL = 256  # dialogues that are sorted by length together


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B dialogues of up to n tokens, padded behind; features and hidden as in Dialogue."""

    token_ids: Tensor  # [B, n] int64
    best_ids: Tensor  # [B, n] int64, -1 where the next token does not count
    features: Tensor  # [B, n, F * d]
    hidden: Tensor  # [B, n, d]


def plan_batches(index: list[tuple[int, int, int]], tokens_per_step: int, seed: int) -> list[list[tuple[int, int]]]:
    """(shard, dialogue) of each batch of one pass, from (shard, dialogue, tokens)."""
    rng = np.random.default_rng(seed)
    shuffled = [index[i] for i in rng.permutation(len(index))]
    batches: list[list[tuple[int, int]]] = []
    for first in range(0, len(shuffled), POOL):
        current: list[tuple[int, int]] = []
        for shard, dialogue, num_tokens in sorted(shuffled[first : first + POOL], key=lambda entry: entry[2]):
            if current and (len(current) + 1) * num_tokens > tokens_per_step:
                batches.append(current)
                current = []
            current.append((shard, dialogue))
        batches.append(current)
    return [batches[i] for i in rng.permutation(len(batches))]


def load_batch(corpus: Corpus, wanted: list[tuple[int, int]]) -> Batch:
    return collate([corpus.shards[shard][dialogue] for shard, dialogue in wanted], has_questions=True)


def collate(dialogues: Sequence[Dialogue], *, has_questions: bool = False) -> Batch:
    """has_questions: what the target would say behind a question's tokens counts too, as it wrote them itself."""
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
    return Batch(*map(torch.from_numpy, (token_ids, best_ids, features, hidden)))
