"""What a head is to learn: the target's own probabilities over the ids that it may draft, at every step of a chain."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, pad

from lab.train_head.batches import Batch
from lab.train_head.begin import TargetParts
from lab.train_head.model import Head, SoftCrossEntropy

STRIP = 128  # rows whose probabilities are at hand in float32 at once


class Objective:
    """Of one target. `token_ids` [num_ids] are the target's ids of a head's logits, `place` [vocab_size] the reverse
    (-1: none), `rows` [num_ids, hidden_size] what the target multiplies its last hidden state with for them, `table`
    [vocab_size, hidden_size] the embedding."""

    def __init__(self, target: TargetParts, token_ids: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of products."""
        self._target_rows, self._device, self._dtype = target.lm_head, device, dtype
        self._norm, self._eps = target.norm.to(device), target.spec.rms_eps
        self.table = target.embedding.to(device)
        self.place = torch.full((target.spec.vocab_size,), -1, device=device)
        self.use_ids(token_ids)

    def use_ids(self, token_ids: Tensor) -> None:
        self.token_ids = token_ids.to(self._device)
        self.rows = self._target_rows[token_ids.to(self._target_rows.device)].to(self._device)
        self.place.fill_(-1)[self.token_ids] = torch.arange(token_ids.numel(), device=self._device)

    def losses(
        self, head: Head, batch: Batch, *, chain_length: int, step_decay: float, num_columns: int, seed: int
    ) -> tuple[Tensor, float]:
        """The sum over steps, step k weighing step_decay^(k-1), and the first step's alone, in nats per row.

        num_columns, seed: see `_columns`; 0 compares all logits. Rows whose best token the head cannot draft are left
        out, as published.
        """
        best = batch.best_ids.to(self._device)
        is_known = (best >= 0) & (self.place[best.clamp(min=0)] >= 0)  # [B, n]
        row_of = is_known.flatten().cumsum(0).sub_(1).view_as(best)  # of a known one among the known
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            wanted = self._wanted(batch.hidden.to(self._device)[is_known])
            embedded = embedding(batch.token_ids.to(self._device), self.table)
            chains = head.chains(embedded, batch.features.to(self._device, embedded.dtype), chain_length)
        matrix, bias = head.lm_head.weight.to(self._dtype), None
        if 0 < num_columns < matrix.shape[0]:
            columns, bias = _columns(wanted, num_columns, seed)
            matrix, wanted = matrix[columns], wanted[:, columns]
            wanted = wanted / wanted.sum(-1, keepdim=True, dtype=torch.float32).to(self._dtype)
        total, first, n = torch.zeros((), device=self._device), 0.0, best.shape[1]
        for step, hidden in enumerate(chains, 1):
            rows, places = pad(is_known[:, step:], (0, min(step, n)), value=False).nonzero(as_tuple=True)
            if rows.numel():
                own = hidden[rows, places].to(self._dtype)
                loss = SoftCrossEntropy.apply(own, matrix, wanted[row_of[rows, places + step]], bias)
                total = total + step_decay ** (step - 1) * loss
                first = first or float(loss.detach())
        return total, first

    @torch.no_grad()
    def _wanted(self, hidden: Tensor) -> Tensor:
        """The target's probabilities over the ids that the head knows, [R, num_ids], of hidden [R, hidden_size]."""
        x = hidden.float()
        normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._norm).to(self._dtype)
        wanted, rows = (
            torch.empty(x.shape[0], self.rows.shape[0], device=x.device, dtype=self._dtype),
            self.rows.to(self._dtype),
        )
        for first in range(0, x.shape[0], STRIP):
            own = slice(first, first + STRIP)
            wanted[own] = linear(normed[own], rows).float().softmax(-1)
        return wanted


@torch.no_grad()
def _columns(wanted: Tensor, num_columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits to compare [num_columns], and what is added to each: a column that stands for several that were not
    drawn weighs as much as they would. Two thirds are those that the target gives most in wanted [R, num_ids]."""
    num_best = num_columns * 2 // 3
    order = wanted.sum(0, dtype=torch.float32).argsort(descending=True)
    best, rest = order[:num_best], order[num_best:]
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(rest.numel(), generator=rng)[: num_columns - num_best]
    bias = torch.zeros(num_columns, device=wanted.device)
    bias[num_best:] = math.log(rest.numel() / drawn.numel())
    return torch.cat([best, rest[drawn.to(rest.device)]]), bias
