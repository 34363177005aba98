"""Trains a head by training-time test: each row drafts a short chain, and every step of it is compared with the target.

The plan depends on steps, not on seconds, so an interrupted run resumes as if it had not been. A finished run continues
with a new plan and its weights once there are more data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear, pad

from faser_backend.core.errors import ConfigError
from faser_backend.lab.train_head.checkpoint import head_spec, new_head
from faser_backend.lab.train_head.data import HELD_OUT_SHARDS, Batch, Corpus, Dialogue, Kind
from faser_backend.lab.train_head.head import Head
from faser_backend.lab.train_head.options import HeadOptions
from faser_backend.lab.train_head.target import Target

STATE_FILE = "training.pt"
DEFAULT_NUM_IDS = 8192
STEP_DECAY = 0.8  # weight of each further step of a chain
WEIGHT_DECAY, MAX_GRADIENT = 0.01, 1.0
NUM_CHECKED = 32  # held-out dialogues of a check; the last check takes all
DEPTHS = 5  # that a check counts
CHAIN = 4  # draft tokens of the chains that a check compares
CHECKED_AT_ONCE = 8


@dataclass(slots=True)
class Progress:
    """A run over shards [first_shard, num_shards), and the curves of all runs: (rows learned from, value)."""

    first_shard: int
    num_shards: int
    passes: int
    seed: int
    step: int = 0
    num_rows: int = 0  # learned from, in all runs
    losses: list[tuple[int, float]] = field(default_factory=list)
    checks: list[tuple[int, list[float], float]] = field(
        default_factory=list
    )  # rows, agreement by depth, accepted tokens


class Objective:
    """The target's probabilities over token_ids [num_ids], which a head can draft, at every step of a chain."""

    def __init__(self, target: Target, token_ids: Tensor, dtype: torch.dtype) -> None:
        device = target.device
        self._target, self._device, self._dtype, self._table = target, device, dtype, target.embedding.float()
        self.token_ids = token_ids.to(device)
        self._rows = target.lm_head[self.token_ids].to(dtype)  # [num_ids, hidden_size]
        self._index_of = torch.full((target.spec.vocab_size,), -1, device=device)  # by the target's id; -1: none
        self._index_of[self.token_ids] = torch.arange(token_ids.numel(), device=device)

    def losses(
        self, head: Head, batch: Batch, *, chain_length: int, num_columns: int, seed: int
    ) -> tuple[Tensor, float]:
        """Returns the sum over steps, step k weighing STEP_DECAY^(k-1), and the first step's loss, in nats per row.

        num_columns, seed: see `_columns`; 0 compares all logits. Rows whose best token the head cannot draft are left
        out, as published.
        """
        best = batch.best_ids
        is_known = (best >= 0) & (self._index_of[best.clamp(min=0)] >= 0)  # [B, n]
        row_of = is_known.flatten().cumsum(0).sub_(1).view_as(best)  # of a known row among the known ones
        with self._autocast():
            wanted = self._wanted(batch.normed[is_known])
            chains = self._chains(head, batch, chain_length)
        matrix, bias = head.lm_head.weight.to(self._dtype), None
        if 0 < num_columns < matrix.shape[0]:
            columns, bias = _columns(wanted, num_columns, seed)
            matrix, wanted = matrix[columns], wanted[:, columns]
            wanted = wanted / wanted.sum(-1, keepdim=True)
        total, first, n = torch.zeros((), device=self._device), 0.0, best.shape[1]
        for step, hidden in enumerate(chains, 1):
            rows, positions = pad(is_known[:, step:], (0, min(step, n)), value=False).nonzero(as_tuple=True)
            if rows.numel():
                picked = hidden.flatten(0, 1).index_select(0, rows * n + positions)  # its gradient is added up quickly
                logits = linear(picked.to(self._dtype), matrix).float()
                shifted = logits if bias is None else logits + bias
                loss = cross_entropy(shifted, wanted[row_of[rows, positions + step]])
                total = total + STEP_DECAY ** (step - 1) * loss
                first = first or float(loss.detach())
        return total, first

    @torch.no_grad()
    def agreement(self, head: Head, dialogues: Sequence[Dialogue]) -> tuple[list[float], float]:
        """Returns two measures over held-out answers.

        The first, by depth of the chain with true tokens given: the share of rows whose best token is the target's. The
        second, over greedy answers: how many of CHAIN tokens precede the first different one, as a verification
        accepts.
        """
        ordered = sorted(dialogues, key=lambda dialogue: dialogue.num_tokens)
        hits, rows = np.zeros(DEPTHS), np.zeros(DEPTHS)
        num_kept = num_chains = 0
        for first in range(0, len(ordered), CHECKED_AT_ONCE):
            batch = Batch.of(ordered[first : first + CHECKED_AT_ONCE], self._target, learned=Kind.ANSWER)
            with self._autocast():
                chains = self._chains(head, batch, DEPTHS)
                guesses = torch.stack([self.token_ids[linear(x, head.lm_head.weight).argmax(-1)] for x in chains])
            n = batch.token_ids.shape[1]
            best = torch.stack([pad(batch.best_ids[:, k:], (0, min(k, n)), value=-1) for k in range(1, DEPTHS + 1)])
            right, counts = guesses == best, best >= 0
            hits += (right & counts).sum((1, 2)).cpu().numpy()
            rows += counts.sum((1, 2)).cpu().numpy()
            kinds = torch.stack([pad(batch.kinds[:, k:], (0, min(k, n))) for k in range(2, CHAIN + 2)])
            whole = (kinds == Kind.GREEDY).all(0)
            num_kept += int((right[:CHAIN].int().cumprod(0).sum(0) * whole).sum())
            num_chains += int(whole.sum())
        return (hits / np.maximum(rows, 1)).tolist(), num_kept / max(num_chains, 1)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32)

    def _chains(self, head: Head, batch: Batch, num_steps: int) -> list[Tensor]:
        embedded = embedding(batch.token_ids, self._table)
        return head.chains(embedded, batch.features.to(embedded.dtype), num_steps)

    @torch.no_grad()
    def _wanted(self, normed: Tensor) -> Tensor:
        """Returns the target's probabilities over the head's ids, [R, num_ids], from its states [R, hidden_size]."""
        return linear(normed.to(self._dtype), self._rows).float().softmax(-1)


@torch.no_grad()
def _columns(wanted: Tensor, num_columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns logits to compare [num_columns], and an addend of each, which weighs a drawn column for the undrawn ones.
    Two thirds are the most likely of the target's wanted [R, num_ids]."""
    num_best = num_columns * 2 // 3
    order = wanted.sum(0).argsort(descending=True)
    best, rest = order[:num_best], order[num_best:]
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(rest.numel(), generator=rng)[: num_columns - num_best]
    bias = torch.zeros(num_columns, device=wanted.device)
    bias[num_best:] = math.log(rest.numel() / drawn.numel())
    return torch.cat([best, rest[drawn.to(rest.device)]]), bias


class Trainer:
    """One head and its optimizers, new or from the last checkpoint."""

    def __init__(self, target: Target, options: HeadOptions, report: Callable[[str], None] = print) -> None:
        """Loads the last checkpoint, or begins. report: called with each line for the user."""
        self._target, self._options, self._report = target, options, report
        self._path = options.folder / STATE_FILE
        self._corpus = Corpus(options.dialogues)
        num_shards = len(self._corpus.shards)
        if num_shards <= HELD_OUT_SHARDS:
            raise ConfigError(f"{options.dialogues}: {num_shards} shards; run the stage write first")
        state = load_state(options) if self._path.exists() else None
        self._shape = shape_of(target, options, None if state is None else state["shape"])
        spec = head_spec(target.spec, self._shape["num_kv_heads"], self._shape["intermediate_size"])
        if state is None:
            token_ids = self._corpus.frequent_ids(target.spec.vocab_size, self._shape["num_ids"])
        else:
            token_ids = state["token_ids"].cpu().numpy()
        dtype = torch.float32 if options.precision == "fp32" else torch.bfloat16
        self._objective = Objective(target, torch.from_numpy(token_ids), dtype)
        self.head = new_head(target, spec, token_ids, options.seed).to(target.device)
        self.progress = Progress(0, num_shards, options.passes, options.seed)
        parameters = dict(self.head.named_parameters())
        matrices = [p for name, p in parameters.items() if p.ndim == 2 and name != "lm_head.weight"]
        others = [p for name, p in parameters.items() if p.ndim == 1 or name == "lm_head.weight"]
        self._optimizers = [
            torch.optim.Muon(
                matrices, lr=options.matrix_rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=options.rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY),
        ]
        if state is not None:
            self.head.load_state_dict(state["head"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.progress = Progress(**state["progress"])

    @property
    def num_steps(self) -> int:
        """Returns the number of steps of the plan."""
        return len(self._batches())

    @property
    def is_done(self) -> bool:
        return self.progress.step >= self.num_steps

    def go_on(self) -> None:
        """Begins another run from the current weights, over all data or over the new alone.

        Raises ConfigError if there are no new data.
        """
        old, num_shards = self.progress, len(self._corpus.shards)
        if self._options.new_data and num_shards <= old.num_shards:
            raise ConfigError(f"no new data after shard {old.num_shards}; run the stage write first")
        old.first_shard = old.num_shards if self._options.new_data else 0
        old.num_shards, old.passes, old.seed, old.step = num_shards, self._options.passes, old.seed + 1, 0

    def run(
        self, on_step: Callable[[int], object] = lambda done: None, on_check: Callable[[], object] = lambda: None
    ) -> None:
        """Trains to the end of the plan, then checks all held-out dialogues and saves the head.

        on_step: called with the steps done; on_check: after each checkpoint.
        """
        options, progress = self._options, self.progress
        batches = self._batches()
        recent: list[float] = []
        while progress.step < len(batches):
            found = [self._corpus.shards[shard][dialogue] for shard, dialogue in batches[progress.step]]
            batch = Batch.of(found, self._target, learned=Kind.QUESTION)
            recent.append(self._learn(batch, len(batches)))
            progress.step += 1
            progress.num_rows += int((batch.best_ids >= 0).sum())
            is_last = progress.step == len(batches)
            if is_last or progress.step % options.report_every == 0:
                progress.losses.append((progress.num_rows, float(np.mean(recent))))
                self._report(f"step {progress.step}/{len(batches)}, loss {np.mean(recent):.4f}")
                recent = []
            on_step(progress.step)
            if is_last or progress.step % options.check_every == 0:
                self._check(None if is_last else NUM_CHECKED)
                self.save()
                on_check()

    def save(self) -> None:
        """Writes the checkpoint atomically."""
        state = {
            "shape": self._shape,
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "token_ids": self._objective.token_ids.cpu(),
            "progress": asdict(self.progress),
        }
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._path)

    def _batches(self) -> list[list[tuple[int, int]]]:
        run, size = self.progress, self._options.tokens_per_step
        plans = (
            self._corpus.plan(run.first_shard, run.num_shards, size, run.seed * 1000 + i) for i in range(run.passes)
        )
        return [batch for plan in plans for batch in plan]

    def _learn(self, batch: Batch, num_steps: int) -> float:
        """Runs one step. Returns the loss of the chains' first tokens, in nats per row."""
        options, step = self._options, self.progress.step
        left = (num_steps - step) / max(num_steps * options.decay_share, 1)
        share = min(1.0, (step + 1) / options.warmup_steps, left)
        for optimizer, rate in zip(self._optimizers, (options.matrix_rate, options.rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.zero_grad(set_to_none=True)
        total, first = self._objective.losses(
            self.head,
            batch,
            chain_length=options.chain_length,
            num_columns=options.num_columns,
            seed=options.seed * 1_000_003 + self.progress.num_rows,
        )
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRADIENT)
        for optimizer in self._optimizers:
            optimizer.step()
        return first

    def _check(self, num_dialogues: int | None) -> None:
        shares, kept = self._objective.agreement(self.head, self._corpus.held_out()[:num_dialogues])
        self.progress.checks.append((self.progress.num_rows, shares, kept))
        shown = " / ".join(f"{share:.3f}" for share in shares)
        self._report(
            f"held-out agreement at depth 1 to {DEPTHS}: {shown}, {kept:.2f} tokens of chains of {CHAIN} accepted"
        )


def load_state(options: HeadOptions) -> dict[str, Any]:
    """Returns the last checkpoint. Raises ConfigError if there is none, or an older format."""
    path = options.folder / STATE_FILE
    if not path.exists():
        raise ConfigError(f"{path}: missing; run the stage train first")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if "shape" not in state:
        raise ConfigError(f"{path}: written by another version; remove it to start over")
    return state


def shape_of(target: Target, options: HeadOptions, begun: dict[str, int] | None) -> dict[str, int]:
    """Returns num_ids, num_kv_heads and intermediate_size from the checkpoint or, for a new head, the options.

    Raises ConfigError if an option contradicts the checkpoint, or is impossible.
    """
    spec = target.spec
    defaults = {
        "num_ids": min(DEFAULT_NUM_IDS, spec.vocab_size),
        "num_kv_heads": spec.num_kv_heads,
        "intermediate_size": spec.intermediate_size,
    }
    asked = {name: value for name in defaults if (value := getattr(options, name)) is not None}
    shape = begun or defaults | asked
    for name, value in asked.items():
        if value != shape[name]:
            raise ConfigError(f"{name} = {value}: training in {options.folder} began with {shape[name]}")
    if spec.num_heads % shape["num_kv_heads"]:
        raise ConfigError(f"num_kv_heads = {shape['num_kv_heads']}: must divide {spec.num_heads} heads")
    if not 0 < shape["num_ids"] <= spec.vocab_size:
        raise ConfigError(f"num_ids = {shape['num_ids']}: must lie in [1, {spec.vocab_size}]")
    return shape
