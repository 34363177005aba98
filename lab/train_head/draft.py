"""Common to all kinds of drafts in training: a network, its loss against the target, and its check."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from faser_backend.core.model import ModelSpec
from faser_backend.lab.train_head.data import Batch, Corpus, Dialogue, Kind
from faser_backend.lab.train_head.options import HeadOptions
from faser_backend.lab.train_head.target import Target

CHAIN = 4  # draft tokens of the chains that a check compares
CHECKED_AT_ONCE = 8
Default = Callable[[ModelSpec, Corpus], int]
SAME_SHAPE: dict[str, Default] = {
    "num_kv_heads": lambda target, _: target.num_kv_heads,
    "intermediate_size": lambda target, _: target.intermediate_size,
}


class Learned(NamedTuple):
    """The outcome of a batch."""

    total: Tensor  # the loss to be lowered
    first: float  # loss of the first draft tokens, in nats per row
    num_rows: int  # learned from


class Check(NamedTuple):
    """Measures over held-out answers."""

    shares: list[float]  # by depth: rows whose best token is the target's
    kept: float  # tokens before the first different one, as a verification accepts, of chains behind greedy answers
    chain_length: int
    details: Sequence[str] = ()  # lines for the user, of the last check
    bins: Sequence[tuple[int, float, float]] = ()  # by chance: tokens, their mean chance, and share that agree


class Draft(ABC):
    """A draft in training."""

    SHAPE: ClassVar[dict[str, Default]]  # options that fix the shape, and their defaults
    LEARNED: ClassVar[Kind]  # the lowest kind of the tokens that are learned
    model: nn.Module  # on the target's device

    def __init__(self, target: Target, options: HeadOptions) -> None:
        self._target, self._options, self._table = target, options, target.embedding.float()
        self._dtype = torch.float32 if options.precision == "fp32" else torch.bfloat16

    @abstractmethod
    def losses(self, batch: Batch, seed: int) -> Learned:
        """Compares drafts with the target's probabilities. seed: of what is drawn."""

    @abstractmethod
    def check(self, dialogues: Sequence[Dialogue]) -> Check:
        """Measures over held-out answers."""

    @staticmethod
    @abstractmethod
    def save(directory: Path, target: ModelSpec, state: dict[str, Any]) -> int:
        """Writes the network of a checkpoint in the public format. Returns the bytes of the files."""

    def _batches(self, dialogues: Sequence[Dialogue], learned: Kind) -> Iterator[Batch]:
        ordered = sorted(dialogues, key=lambda dialogue: dialogue.num_tokens)
        for first in range(0, len(ordered), CHECKED_AT_ONCE):
            yield Batch.of(ordered[first : first + CHECKED_AT_ONCE], self._target, learned=learned)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._target.device.type, self._dtype, enabled=self._dtype != torch.float32)


def chosen_columns(likely: Tensor, num_columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns logits to compare (sampled softmax, Jean et al. 2015), and an addend of each, which weighs a drawn column
    for the undrawn ones. Two thirds of num_columns, and all with an infinite score, are the highest of likely [K]; 0
    compares all."""
    num_columns = num_columns or likely.numel()
    num_best = num_columns * 2 // 3
    num_drawn, num_best = num_columns - num_best, max(num_best, int(likely.isinf().sum()))
    order = likely.argsort(descending=True)
    best, rest = order[:num_best], order[num_best:]
    drawn = torch.randperm(rest.numel(), generator=torch.Generator().manual_seed(seed))[:num_drawn]
    bias = torch.zeros(best.numel() + drawn.numel(), device=likely.device)
    bias[num_best:] = math.log(max(rest.numel(), 1) / max(drawn.numel(), 1))
    return torch.cat([best, rest[drawn.to(rest.device)]]), bias
