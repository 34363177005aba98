"""How often a head guesses what its target would say, by depth of the chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, pad

from lab.train_head.batches import Batch, collate
from lab.train_head.model import Head
from lab.train_head.shards import Dialogue

DEPTHS = 5
CHAIN = 4
DIALOGUES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over the answers of dialogues that the head has not learned from."""

    by_depth: tuple[float, ...]  # share of rows whose best token is the target's, the true tokens being given
    kept: float  # tokens of a chain of CHAIN up to the first other one, over greedy answers: what a verification keeps

    def __str__(self) -> str:
        return f"{' / '.join(f'{share:.3f}' for share in self.by_depth)}, chains of {CHAIN} keep {self.kept:.2f}"


@torch.no_grad()
def agreement(
    head: Head, table: Tensor, token_ids: Tensor, dialogues: Sequence[Dialogue], dtype: torch.dtype
) -> Agreement:
    """table [vocab_size, hidden_size]: the embedding; token_ids [num_ids]: the target's id of each logit."""
    ordered = sorted(dialogues, key=lambda dialogue: dialogue.num_tokens)
    hits, rows = np.zeros(DEPTHS), np.zeros(DEPTHS)
    num_kept = num_chains = 0
    for first in range(0, len(ordered), DIALOGUES_AT_ONCE):
        together = ordered[first : first + DIALOGUES_AT_ONCE]
        batch = collate(together)
        right, counts = _right(head, table, token_ids, batch, dtype)
        hits += (right & counts).sum((1, 2)).numpy()
        rows += counts.sum((1, 2)).numpy()
        greedy = torch.tensor([dialogue.is_greedy for dialogue in together])[:, None]
        whole = counts[CHAIN - 1] & greedy
        num_kept += int((right[:CHAIN].int().cumprod(0).sum(0) * whole).sum())
        num_chains += int(whole.sum())
    return Agreement(tuple((hits / np.maximum(rows, 1)).tolist()), num_kept / max(num_chains, 1))


def _right(head: Head, table: Tensor, token_ids: Tensor, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[DEPTHS, B, n] whether each row's guess is the target's, and whether the row counts."""
    device = table.device
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        embedded = embedding(batch.token_ids.to(device), table)
        chains = head.chains(embedded, batch.features.to(device, table.dtype), DEPTHS)
        guesses = [token_ids[linear(hidden, head.lm_head.weight).argmax(-1)].cpu() for hidden in chains]
    n = batch.token_ids.shape[1]
    best = torch.stack([pad(batch.best_ids[:, k:], (0, min(k, n)), value=-1) for k in range(1, DEPTHS + 1)])
    return torch.stack(guesses) == best, best >= 0
