"""Training a head by test in training: each row drafts a short chain, and every step of it is compared with the target.

Steps, not seconds, decide the plan, so that a run that was cut off goes on as if it had not been. A run that is done
goes on with a plan of its own once there are more data, from the weights that it left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from faser_backend.core.errors import ConfigError
from faser_backend.core.model import ModelSpec
from lab.train_head.batches import Batch, load_batch, plan_batches
from lab.train_head.begin import TargetParts, new_head
from lab.train_head.crew import STEPS_APART, Crew
from lab.train_head.measure import Agreement, agreement
from lab.train_head.objective import Objective
from lab.train_head.shards import Corpus

STATE_FILE = "training.pt"


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """chain_length: steps of a chain; step_decay: weight of each further one; num_columns: logits that a step compares,
    those that the target gives most and others by chance, 0 for all (sampled softmax, Jean et al. 2015)."""

    passes: int = 3
    tokens_per_step: int = 2048
    chain_length: int = 3
    step_decay: float = 0.8
    num_columns: int = 3072
    matrix_rate: float = 1e-3  # of Muon, scaled as AdamW's
    rate: float = 4e-4  # of AdamW, for norms and the head's rows
    weight_decay: float = 0.01
    warmup_steps: int = 40
    decay_share: float = 0.5  # of the steps, at the end, in which rates fall to zero
    max_gradient: float = 1.0
    seed: int = 0
    report_every: int = 20
    check_every: int = 100  # steps between checkpoints and looks at held-out dialogues
    num_checked: int = 32  # held-out dialogues of such a look; the last one takes all


@dataclass(slots=True)
class Plan:
    """What a run goes through: shards [first_shard, num_shards), held-out ones left out."""

    num_shards: int
    passes: int
    seed: int
    first_shard: int = 0


@dataclass(slots=True)
class Progress:
    """What is kept of a run beside weights. Curves hold (tokens learned from, value)."""

    plan: Plan
    step: int = 0
    num_tokens: int = 0  # rows learned from, in all runs; other processes' batches are taken to be as full
    losses: list[tuple[int, float]] = field(default_factory=list)
    checks: list[tuple[int, list[float], float]] = field(default_factory=list)  # tokens, by depth, kept


class Trainer:
    """One head and its optimizers. `report` is told each line that a person may want to read."""

    def __init__(
        self,
        target: TargetParts,
        spec: ModelSpec,
        token_ids: np.ndarray,
        corpus: Corpus,
        *,
        directory: Path,
        options: TrainingOptions,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        report: Callable[[str], None] = print,
        crew: Crew | None = None,
    ) -> None:
        """token_ids [num_ids]: the target's ids that the head may draft. directory: of the checkpoint. crew: that it
        belongs to; alone unless given."""
        self._crew = crew or Crew()
        self.options, self.corpus, self._report, self._dtype = options, corpus, report, dtype
        self._path, self._device = directory / STATE_FILE, torch.device(device)
        self._objective = Objective(target, torch.from_numpy(token_ids), self._device, dtype)
        self.head = new_head(target, spec, token_ids, options.seed).to(self._device)
        self.progress = Progress(Plan(len(corpus.shards), options.passes, options.seed))
        self._optimizers = self._new_optimizers()
        if self._path.exists():
            self._load()

    def run(
        self,
        *,
        max_steps: int | None = None,
        on_step: Callable[[int, int], object] = lambda done, total: None,
        on_check: Callable[[], object] = lambda: None,
    ) -> Agreement:
        """Learns, then looks at all held-out dialogues and keeps what was learned. Returns the agreement there."""
        self.learn(max_steps=max_steps, on_step=on_step, on_check=on_check)
        result = self._check(None)
        self.save()
        return result

    def learn(
        self,
        *,
        max_steps: int | None = None,
        on_step: Callable[[int, int], object] = lambda done, total: None,
        on_check: Callable[[], object] = lambda: None,
    ) -> None:
        """Trains to the end of the plan, or max_steps of it.

        on_step is told steps done and steps of the plan; on_check is called when a checkpoint has been written.
        """
        options, progress = self.options, self.progress
        batches = self._batches()
        last = len(batches) if max_steps is None else min(progress.step + max_steps, len(batches))
        recent: list[float] = []
        while progress.step < last:
            batch = load_batch(self.corpus, batches[progress.step])
            recent.append(self._learn(batch, len(batches)))
            progress.step += 1
            progress.num_tokens += int((batch.best_ids >= 0).sum()) * self._crew.size
            if progress.step % STEPS_APART == 0 or progress.step == last:
                self._crew.average(self.head.parameters())
            on_step(progress.step, len(batches))
            if progress.step % options.report_every == 0 or progress.step == len(batches):
                progress.losses.append((progress.num_tokens, float(np.mean(recent))))
                self._report(f"step {progress.step}/{len(batches)}, loss {np.mean(recent):.4f}")
                recent = []
            if progress.step % options.check_every == 0 and self._crew.leads:
                self._check(options.num_checked)
                self.save()
                on_check()

    @property
    def is_done(self) -> bool:
        return self.progress.step >= len(self._batches())

    def go_on(self, token_ids: np.ndarray | None = None, *, new_alone: bool = False) -> None:
        """Begins another run from the weights as they are, over all data that there are now, or over the new alone.

        token_ids: the head drafts these from now on, as many as before; ids that it knew keep their rows, and others
        begin as the target's. Raises ConfigError where there are no new data.
        """
        old = self.progress.plan
        if new_alone and len(self.corpus.shards) <= old.num_shards:
            raise ConfigError(f"no data were written since training ended: {old.num_shards} shards, all learned from")
        first = old.num_shards if new_alone else 0
        self.progress.plan = Plan(len(self.corpus.shards), self.options.passes, old.seed + 1, first)
        self.progress.step = 0
        if token_ids is not None:
            self._change_ids(torch.from_numpy(token_ids))

    def save(self) -> None:
        """Writes the checkpoint, whole or not at all."""
        state = {
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "token_ids": self._objective.token_ids.cpu(),
            "progress": asdict(self.progress),
        }
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._path)

    def _load(self) -> None:
        state: dict[str, Any] = torch.load(self._path, map_location=self._device, weights_only=True)
        self._objective.use_ids(state["token_ids"])
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        saved = state["progress"]
        self.progress = Progress(**{**saved, "plan": Plan(**saved["plan"])})

    @torch.no_grad()
    def _change_ids(self, token_ids: Tensor) -> None:
        """Moves rows of the head, and what AdamW knows of them, to the places of the new ids."""
        place = self._objective.place[token_ids.to(self._device)]  # [num_ids], -1 for an id that the head did not know
        self._objective.use_ids(token_ids)
        weight, is_known = self.head.lm_head.weight, (place >= 0)[:, None]
        weight.copy_(torch.where(is_known, weight[place.clamp(min=0)], self._objective.rows))
        for value in self._optimizers[-1].state[weight].values():
            if value.shape == weight.shape:
                value.copy_(torch.where(is_known, value[place.clamp(min=0)], 0.0))

    def _batches(self) -> list[list[tuple[int, int]]]:
        plan = self.progress.plan
        index = self.corpus.training_index(plan.first_shard, plan.num_shards)
        size = self.options.tokens_per_step
        every = [batch for i in range(plan.passes) for batch in plan_batches(index, size, plan.seed * 1000 + i)]
        return self._crew.share(every)

    def _new_optimizers(self) -> list[torch.optim.Optimizer]:
        options = self.options
        matrices = [p for name, p in self.head.named_parameters() if p.ndim == 2 and name != "lm_head.weight"]
        others = [p for name, p in self.head.named_parameters() if p.ndim == 1 or name == "lm_head.weight"]
        decay = options.weight_decay
        return [
            torch.optim.Muon(matrices, lr=options.matrix_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=options.rate, betas=(0.9, 0.95), weight_decay=decay),
        ]

    def _learn(self, batch: Batch, num_steps: int) -> float:
        """One step; returns the loss of the chains' first tokens, nats per row."""
        options = self.options
        share = self._rate_share(num_steps)
        for optimizer, rate in zip(self._optimizers, (options.matrix_rate, options.rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.zero_grad(set_to_none=True)
        total, first = self._objective.losses(
            self.head,
            batch,
            chain_length=options.chain_length,
            step_decay=options.step_decay,
            num_columns=options.num_columns,
            seed=options.seed * 1_000_003 + self.progress.num_tokens,
        )
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), options.max_gradient)
        for optimizer in self._optimizers:
            optimizer.step()
        return first

    def _rate_share(self, num_steps: int) -> float:
        warm = (self.progress.step + 1) / self.options.warmup_steps
        left = (num_steps - self.progress.step) / max(num_steps * self.options.decay_share, 1)
        return min(1.0, warm, left)

    def _check(self, num_dialogues: int | None) -> Agreement:
        dialogues = list(self.corpus.held_out())[:num_dialogues]
        objective = self._objective
        found = agreement(self.head, objective.table, objective.token_ids, dialogues, self._dtype)
        self.progress.checks.append((self.progress.num_tokens, list(found.by_depth), found.kept))
        self._report(f"held-out agreement at depth 1 to {len(found.by_depth)}: {found}")
        return found
