"""Trains a block drafter: blocks begin at random positions of answers, and every mask is compared with the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear

from faser_backend.core.model import ModelSpec
from faser_backend.lab.train_head.checkpoint import block_spec, new_block, save_block
from faser_backend.lab.train_head.data import Batch, Dialogue, Kind
from faser_backend.lab.train_head.draft import CHAIN, SAME_SHAPE, Check, Default, Draft, Learned, chosen_columns
from faser_backend.lab.train_head.options import HeadOptions
from faser_backend.lab.train_head.target import Target

DEFAULT_NUM_LAYERS, DEFAULT_BLOCK_SIZE = 3, 8
ROWS_PER_TOKEN = 2  # of all blocks of a conversation: bounds the memory of attention
GAMMA = (8, 10, 16), (4, 5, 7)  # sizes of blocks, and the positions over which a mask's weight falls by e
WHOLE_SHARE = 0.5  # of steps with whole blocks; others have shorter ones, as a policy may ask for fewer tokens
NUM_WEIGHED = 256  # rows whose probabilities choose the columns of a step
LOGITS_AT_ONCE = 1 << 25  # of a check
NUM_BINS = 10


class BlockDraft(Draft):
    """A drafter of whole blocks, over all ids of the target."""

    SHAPE: ClassVar[dict[str, Default]] = {
        "num_layers": lambda target, _: min(DEFAULT_NUM_LAYERS, target.num_layers),
        "block_size": lambda *_: DEFAULT_BLOCK_SIZE,
        "mask_id": lambda target, corpus: corpus.unused_id(target.vocab_size),
        **SAME_SHAPE,
    }
    LEARNED = Kind.ANSWER

    def __init__(self, target: Target, options: HeadOptions, shape: dict[str, int], _: np.ndarray) -> None:
        super().__init__(target, options)
        self._size, self._mask_id, spec = shape["block_size"], shape["mask_id"], block_spec(target.spec, shape)
        self.model = new_block(target, spec, options.seed).to(target.device)
        self._rows = target.lm_head.to(self._dtype)

    @staticmethod
    def save(directory: Path, target: ModelSpec, state: dict[str, Any]) -> int:
        return save_block(directory, target, block_spec(target, state["shape"]), state["head"])

    def losses(self, batch: Batch, seed: int) -> Learned:
        """Averages the losses of all masks, mask k weighing exp(-(k-1) / gamma), gamma by the size of blocks as in
        other trainers of DFlash."""
        rng = torch.Generator().manual_seed(seed)
        share, shorter = float(torch.rand((), generator=rng)), torch.randint(2, self._size + 1, (), generator=rng)
        size = self._size if share < WHOLE_SHARE else int(shorter)
        anchors, is_learned = self._anchors(batch, size, rng)
        index = is_learned.flatten().nonzero()[:, 0]  # of R masks
        with self._autocast():
            hidden = self.drafted(batch, anchors, size).flatten(0, 2).index_select(0, index)
        first_of = torch.arange(len(anchors), device=anchors.device)[:, None, None] * batch.token_ids.shape[1]
        before = (first_of + _ahead(batch, anchors, size)).flatten()[index]
        normed, best_ids = batch.normed.flatten(0, 1)[before].to(self._dtype), batch.best_ids.flatten()[before]
        columns, bias = chosen_columns(self._likely(normed, best_ids, rng), self._options.num_columns, seed)
        logits, wanted = (linear(x, self._rows[columns]).float() for x in (hidden.to(self._dtype), normed))
        losses = cross_entropy(logits + bias, wanted.softmax(-1), reduction="none")
        mask = index % (size - 1)
        weights = torch.exp(-mask / float(np.interp(self._size, *GAMMA)))
        first = losses.detach()[mask == 0].mean()
        return Learned((losses * weights).sum() / weights.sum(), float(first), mask.numel())

    @torch.no_grad()
    def check(self, dialogues: Sequence[Dialogue]) -> Check:
        """Measures whole blocks in greedy answers, and how often tokens agree that got a chance."""
        rng, found = torch.Generator().manual_seed(0), []
        for batch in self._batches(dialogues, Kind.GREEDY):
            anchors, is_known = self._anchors(batch, self._size, rng)
            with self._autocast():
                guesses, chances = self._best(self.drafted(batch, anchors, self._size))
            best = batch.best_ids.gather(1, _ahead(batch, anchors, self._size).flatten(1)).view_as(guesses)
            found.append(torch.stack([guesses == best, is_known, chances]).flatten(1, 2).cpu().numpy())
        right, is_known, chances = np.concatenate(found, axis=1)  # [N, size - 1] each
        is_kept, counts = right.cumprod(1), np.maximum(is_known.sum(0), 1)
        shares, given, kept = ((x * is_known).sum(0) / counts for x in (right, chances, is_kept))
        chain_length = min(CHAIN, self._size - 1)
        whole = is_kept[is_known[:, chain_length - 1] > 0, :chain_length]
        details = [
            f"depth {depth}: given chance {each[0]:.3f}, agreement {each[1]:.3f}, accepted {each[2]:.3f}"
            for depth, each in enumerate(zip(given, shares, kept, strict=True), 1)
        ]
        is_right, chance = right[is_known > 0], chances[is_known > 0]
        index = np.minimum((chance * NUM_BINS).astype(int), NUM_BINS - 1)
        parts = [(chance[index == each], is_right[index == each]) for each in np.unique(index)]
        bins = [(given.size, float(given.mean()), float(agreed.mean())) for given, agreed in parts]
        details += [f"{n} tokens: given chance {given:.3f}, agreement {agreed:.3f}" for n, given, agreed in bins]
        return Check(shares.tolist(), float(whole.sum() / max(len(whole), 1)), chain_length, details, bins)

    def drafted(self, batch: Batch, anchors: Tensor, size: int) -> Tensor:
        """Returns the hidden states [B, A, size - 1, d] of the masks of blocks at anchors [B, A]."""
        token_ids = torch.full((*anchors.shape, size), self._mask_id, device=anchors.device)
        token_ids[..., 0] = batch.token_ids.gather(1, anchors)
        return self.model(embedding(token_ids, self._table), batch.features.float(), anchors)[:, :, 1:]

    def _anchors(self, batch: Batch, size: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws the blocks of each conversation. Returns anchors [B, A], and which masks are compared
        [B, A, size - 1]: those up to the end of an answer."""
        is_known, n = batch.best_ids >= 0, batch.best_ids.shape[1]
        chances = torch.rand(is_known.shape, generator=rng).to(is_known.device).masked_fill(~is_known, -1.0)
        anchors = chances.topk(max(1, n * ROWS_PER_TOKEN // size), dim=1).indices
        ahead = _ahead(batch, anchors, size)
        return anchors, is_known.gather(1, ahead.flatten(1)).view_as(ahead).cumprod(-1).bool()

    @torch.no_grad()
    def _likely(self, normed: Tensor, best_ids: Tensor, rng: torch.Generator) -> Tensor:
        """Returns a score of each id, [vocab_size]: its probability in some rows; infinite for the best of any row."""
        some = torch.randperm(normed.shape[0], generator=rng)[:NUM_WEIGHED].to(normed.device)
        return linear(normed[some], self._rows).float().softmax(-1).sum(0).index_fill_(0, best_ids, torch.inf)

    def _best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the most likely token of each row of hidden [..., d], and its chance."""
        parts = hidden.flatten(0, -2).split(max(1, LOGITS_AT_ONCE // self._rows.shape[0]))
        best = [linear(part, self._rows).float().softmax(-1).max(-1) for part in parts]
        chances, tokens = (torch.cat(each).view(hidden.shape[:-1]) for each in zip(*best, strict=True))
        return tokens, chances


def _ahead(batch: Batch, anchors: Tensor, size: int) -> Tensor:
    """Returns the positions [B, A, size - 1] before the tokens of blocks at anchors [B, A]; the last one has none."""
    every = anchors[..., None] + torch.arange(size - 1, device=anchors.device)
    return every.clamp(max=batch.best_ids.shape[1] - 1)
