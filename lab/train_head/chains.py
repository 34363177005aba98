"""Trains an EAGLE-3 head by training-time test: each row drafts a short chain, all of it compared with the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear, pad

from faser_backend.core.model import ModelSpec
from faser_backend.lab.train_head.checkpoint import head_spec, new_head, save_head
from faser_backend.lab.train_head.data import Batch, Dialogue, Kind
from faser_backend.lab.train_head.draft import CHAIN, SAME_SHAPE, Check, Default, Draft, Learned, chosen_columns
from faser_backend.lab.train_head.options import HeadOptions
from faser_backend.lab.train_head.target import Target

DEFAULT_NUM_IDS, DEFAULT_CHAIN_LENGTH = 8192, 3
STEP_DECAY = 0.8  # weight of each further step of a chain
DEPTHS = 5  # that a check counts


class ChainDraft(Draft):
    """A head that drafts chains of token_ids [num_ids]."""

    SHAPE: ClassVar[dict[str, Default]] = {
        "num_ids": lambda target, _: min(DEFAULT_NUM_IDS, target.vocab_size),
        **SAME_SHAPE,
    }
    LEARNED = Kind.QUESTION

    def __init__(self, target: Target, options: HeadOptions, shape: dict[str, int], token_ids: np.ndarray) -> None:
        super().__init__(target, options)
        device, spec = target.device, head_spec(target.spec, shape["num_kv_heads"], shape["intermediate_size"])
        self.model = self._head = new_head(target, spec, token_ids, options.seed).to(device)
        self._token_ids = torch.from_numpy(token_ids).to(device)
        self._rows = target.lm_head[self._token_ids].to(self._dtype)  # [num_ids, hidden_size]
        self._index_of = torch.full((target.spec.vocab_size,), -1, device=device)  # by the target's id; -1: none
        self._index_of[self._token_ids] = torch.arange(token_ids.size, device=device)

    @staticmethod
    def save(directory: Path, target: ModelSpec, state: dict[str, Any]) -> int:
        spec = head_spec(target, state["shape"]["num_kv_heads"], state["shape"]["intermediate_size"])
        return save_head(directory, target, spec, state["head"], state["token_ids"])

    def losses(self, batch: Batch, seed: int) -> Learned:
        """Adds the losses of the steps, step k weighing STEP_DECAY^(k-1). Rows whose best token the head cannot draft
        are left out, as published."""
        best = batch.best_ids
        is_known = (best >= 0) & (self._index_of[best.clamp(min=0)] >= 0)  # [B, n]
        row_of = is_known.flatten().cumsum(0).sub_(1).view_as(best)  # of a known row among the known ones
        with self._autocast():
            wanted = self._wanted(batch.normed[is_known])
            chains = self._chains(batch, self._options.chain_length or DEFAULT_CHAIN_LENGTH)
        columns, bias = chosen_columns(wanted.sum(0), self._options.num_columns, seed)
        matrix, wanted = self._head.lm_head.weight.to(self._dtype)[columns], wanted[:, columns]
        wanted = wanted / wanted.sum(-1, keepdim=True)
        total, first, n = torch.zeros((), device=best.device), 0.0, best.shape[1]
        for step, hidden in enumerate(chains, 1):
            rows, positions = pad(is_known[:, step:], (0, min(step, n)), value=False).nonzero(as_tuple=True)
            if rows.numel():
                picked = hidden.flatten(0, 1).index_select(0, rows * n + positions)  # its gradient is added up quickly
                logits = linear(picked.to(self._dtype), matrix).float() + bias
                loss = cross_entropy(logits, wanted[row_of[rows, positions + step]])
                total = total + STEP_DECAY ** (step - 1) * loss
                first = first or float(loss.detach())
        return Learned(total, first, int((best >= 0).sum()))

    @torch.no_grad()
    def check(self, dialogues: Sequence[Dialogue]) -> Check:
        """Measures agreement by depth of the chain with true tokens given, and whole chains over greedy answers."""
        hits, rows = np.zeros(DEPTHS), np.zeros(DEPTHS)
        num_kept = num_chains = 0
        for batch in self._batches(dialogues, Kind.ANSWER):
            with self._autocast():
                chains = self._chains(batch, DEPTHS)
                logits = (linear(hidden, self._head.lm_head.weight) for hidden in chains)
                guesses = torch.stack([self._token_ids[each.argmax(-1)] for each in logits])
            n = batch.token_ids.shape[1]
            best = torch.stack([pad(batch.best_ids[:, k:], (0, min(k, n)), value=-1) for k in range(1, DEPTHS + 1)])
            right, counts = guesses == best, best >= 0
            hits += (right & counts).sum((1, 2)).cpu().numpy()
            rows += counts.sum((1, 2)).cpu().numpy()
            kinds = torch.stack([pad(batch.kinds[:, k:], (0, min(k, n))) for k in range(2, CHAIN + 2)])
            whole = (kinds == Kind.GREEDY).all(0)
            num_kept += int((right[:CHAIN].int().cumprod(0).sum(0) * whole).sum())
            num_chains += int(whole.sum())
        return Check((hits / np.maximum(rows, 1)).tolist(), num_kept / max(num_chains, 1), CHAIN)

    def _chains(self, batch: Batch, num_steps: int) -> list[Tensor]:
        embedded = embedding(batch.token_ids, self._table)
        return self._head.chains(embedded, batch.features.to(embedded.dtype), num_steps)

    @torch.no_grad()
    def _wanted(self, normed: Tensor) -> Tensor:
        """Returns the target's probabilities over the head's ids, [R, num_ids], from its states [R, hidden_size]."""
        return linear(normed.to(self._dtype), self._rows).float().softmax(-1)
