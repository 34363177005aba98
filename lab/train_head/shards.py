"""Training data on disk: dialogues that a target wrote, with what it made of each token.

A shard is one safetensors file that appears whole or not at all, so that writing goes on where it was cut off and
training may read while more is written. The first shards are held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from faser_backend.core.errors import ConfigError

HELD_OUT_SHARDS = 1
PATTERN = "dialogues-{:05d}.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Dialogue:
    """One conversation as its target saw it, prompt and answer; n tokens."""

    token_ids: np.ndarray  # [n] int32
    best_ids: np.ndarray  # [n] int32: what the target holds to be most likely behind each token
    features: np.ndarray  # [n, num_features * hidden_size] float16: inputs of some layers, side by side
    hidden: np.ndarray  # [n, hidden_size] float16: output of the last layer, before the norm
    question_start: int  # behind what the chat template puts before a question
    answer_start: int
    is_greedy: bool  # how the answer was drawn

    @property
    def num_tokens(self) -> int:
        return self.token_ids.size


def shard_paths(directory: Path) -> list[Path]:
    """Finished shards in the order in which they were written."""
    return sorted(directory.glob("dialogues-*.safetensors"))


def write_shard(directory: Path, index: int, dialogues: list[Dialogue]) -> Path:
    path = directory / PATTERN.format(index)
    partial = path.with_suffix(".partial")
    joined = {
        name: np.concatenate([getattr(d, name) for d in dialogues])
        for name in ("token_ids", "best_ids", "features", "hidden")
    }
    numbers = [[d.num_tokens, d.question_start, d.answer_start, d.is_greedy] for d in dialogues]
    save_file({**joined, "dialogues": np.array(numbers, np.int32)}, partial)
    partial.replace(path)
    return path


class Shard:
    """A finished shard; arrays are read from the file when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where the file is none of ours."""
        try:
            self._file = safe_open(path, "np")
            self.numbers = self._file.get_tensor("dialogues")  # [num_dialogues, 4]
        except Exception as error:  # the library raises its own kind for each cause
            raise ConfigError(f"{path}: not a shard of dialogues ({error})") from None
        self.starts = np.concatenate([[0], np.cumsum(self.numbers[:, 0])])

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Dialogue:
        rows = slice(int(self.starts[index]), int(self.starts[index + 1]))
        read = {name: self._file.get_slice(name)[rows] for name in ("token_ids", "best_ids", "features", "hidden")}
        _, question_start, answer_start, is_greedy = self.numbers[index].tolist()
        return Dialogue(**read, question_start=question_start, answer_start=answer_start, is_greedy=bool(is_greedy))

    def token_ids(self) -> np.ndarray:
        """Of all dialogues, one behind the other."""
        return self._file.get_tensor("token_ids")


class Corpus:
    """The shards of a directory, as far as they were finished when it was opened or refreshed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.shards: list[Shard] = []
        self.refresh()

    def refresh(self) -> None:
        self.shards += [Shard(path) for path in shard_paths(self._directory)[len(self.shards) :]]

    @property
    def num_tokens(self) -> int:
        return int(sum(shard.starts[-1] for shard in self.shards))

    def training_index(self, first_shard: int, num_shards: int) -> list[tuple[int, int, int]]:
        """(shard, dialogue, tokens) of shards [first_shard, num_shards), but for what is held out."""
        shards = range(max(first_shard, HELD_OUT_SHARDS), num_shards)
        return [(s, d, int(n)) for s in shards for d, n in enumerate(self.shards[s].numbers[:, 0])]

    def held_out(self) -> Iterator[Dialogue]:
        for shard in self.shards[:HELD_OUT_SHARDS]:
            yield from (shard[i] for i in range(len(shard)))
