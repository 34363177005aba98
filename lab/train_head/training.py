"""Trains a draft of any kind over the target's dialogues, with checkpoints and checks.

The plan depends on steps, not on seconds, so an interrupted run resumes as if it had not been. A finished run continues
with a new plan and its weights once there are more data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from faser_backend.core.errors import ConfigError
from faser_backend.core.model import MAX_BLOCK, ModelSpec
from faser_backend.lab.train_head.blocks import BlockDraft
from faser_backend.lab.train_head.chains import ChainDraft
from faser_backend.lab.train_head.data import HELD_OUT_SHARDS, Batch, Corpus
from faser_backend.lab.train_head.draft import Learned
from faser_backend.lab.train_head.options import TRAINING, HeadOptions
from faser_backend.lab.train_head.target import Target

STATE_FILE = "training.pt"
WEIGHT_DECAY, MAX_GRADIENT = 0.01, 1.0
NUM_CHECKED = 32  # held-out dialogues of a check; the last check takes all
KINDS = {"eagle3": ChainDraft, "block": BlockDraft}
PLANNED = f"{TRAINING} precision seed".split()


@dataclass(slots=True)
class Progress:
    """A run over shards [first_shard, num_shards), and the curves of all runs: (rows learned from, value)."""

    first_shard: int
    num_shards: int
    seed: int
    options: dict[str, Any]  # PLANNED ones: an interrupted run goes on with the same
    step: int = 0
    num_rows: int = 0  # learned from, in all runs
    losses: list[tuple[int, float]] = field(default_factory=list)
    checks: list[tuple[int, list[float], float]] = field(default_factory=list)  # with shares and kept of Check
    bins: Sequence[tuple[int, float, float]] = ()  # Check.bins of the last


class Trainer:
    """One draft and its optimizers, new or from the last checkpoint."""

    def __init__(self, target: Target, options: HeadOptions, report: Callable[[str], None] = print) -> None:
        """Loads the last checkpoint, or begins. report: called with each line for the user."""
        self._target, self._options, self._report = target, options, report
        self._path = options.folder / STATE_FILE
        self._corpus = Corpus(options.dialogues)
        num_shards = len(self._corpus.shards)
        if num_shards <= HELD_OUT_SHARDS:
            raise ConfigError(f"{options.dialogues}: {num_shards} shards; run the stage write first")
        state = load_state(options) if self._path.exists() else None
        self._shape = new_shape(target.spec, options, self._corpus) if state is None else state["shape"]
        if state is None:
            num_ids = self._shape.get("num_ids", target.spec.vocab_size)
            self._token_ids = self._corpus.frequent_ids(target.spec.vocab_size, num_ids)
        else:
            self._token_ids = state["token_ids"].cpu().numpy()
        self.draft = KINDS[options.kind](target, options, self._shape, self._token_ids)
        self.progress = Progress(0, num_shards, options.seed, self._planned())
        parameters = dict(self.draft.model.named_parameters())
        matrices = [p for name, p in parameters.items() if p.ndim == 2 and name != "lm_head.weight"]
        others = [p for name, p in parameters.items() if p.ndim == 1 or name == "lm_head.weight"]
        self._optimizers = [
            torch.optim.Muon(
                matrices, lr=options.matrix_rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=options.rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY),
        ]
        if state is not None:
            self.draft.model.load_state_dict(state["head"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.progress = Progress(**state["progress"])
        for name, asked in self._planned().items():
            if not self.is_done and (begun := self.progress.options[name]) != asked:
                raise ConfigError(
                    f"{name} = {asked}: the interrupted run in {options.folder} has {begun}; "
                    f"finish it with that, or remove {STATE_FILE} there to start over"
                )

    def _planned(self) -> dict[str, Any]:
        return {name: getattr(self._options, name) for name in PLANNED}

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
        old.num_shards, old.options, old.seed, old.step = num_shards, self._planned(), old.seed + 1, 0

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
            learned = self._learn(Batch.of(found, self._target, learned=self.draft.LEARNED), len(batches))
            recent.append(learned.first)
            if not np.isfinite(learned.first):
                raise ConfigError(
                    f"step {progress.step + 1}: loss = {learned.first}; remove {self._path}, start again at lower rates"
                )
            progress.step += 1
            progress.num_rows += learned.num_rows
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
            "kind": self._options.kind,
            "shape": self._shape,
            "head": self.draft.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "token_ids": torch.from_numpy(self._token_ids),
            "progress": asdict(self.progress),
        }
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._path)

    def _batches(self) -> list[list[tuple[int, int]]]:
        run = self.progress
        size, passes = run.options["tokens_per_step"], run.options["passes"]
        plans = (self._corpus.plan(run.first_shard, run.num_shards, size, run.seed * 1000 + i) for i in range(passes))
        return [batch for plan in plans for batch in plan]

    def _learn(self, batch: Batch, num_steps: int) -> Learned:
        """Runs one step."""
        options, step = self._options, self.progress.step
        left = (num_steps - step) / max(num_steps * options.decay_share, 1)
        share = min(1.0, (step + 1) / options.warmup_steps, left)
        for optimizer, rate in zip(self._optimizers, (options.matrix_rate, options.rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.zero_grad(set_to_none=True)
        learned = self.draft.losses(batch, options.seed * 1_000_003 + self.progress.num_rows)
        learned.total.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.model.parameters(), MAX_GRADIENT)
        for optimizer in self._optimizers:
            optimizer.step()
        return learned

    def _check(self, num_dialogues: int | None) -> None:
        """Checks some held-out dialogues; with None all, which reports the details too."""
        check = self.draft.check(self._corpus.held_out()[:num_dialogues])
        self.progress.checks.append((self.progress.num_rows, check.shares, check.kept))
        self.progress.bins = check.bins
        shown = " / ".join(f"{share:.3f}" for share in check.shares)
        self._report(
            f"held-out agreement at depth 1 to {len(check.shares)}: {shown}, "
            f"{check.kept:.2f} tokens of chains of {check.chain_length} accepted"
        )
        for line in check.details if num_dialogues is None else ():
            self._report(line)


def load_state(options: HeadOptions) -> dict[str, Any]:
    """Returns the last checkpoint. Raises ConfigError if there is none, or one of another kind, shape or version."""
    path = options.folder / STATE_FILE
    if not path.exists():
        raise ConfigError(f"{path}: missing; run the stage train first")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        is_known = "shape" in state and "options" in state["progress"]
    except Exception as error:  # the library raises another class for each cause
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path}: damaged ({reason}); remove it to start over") from None
    if not is_known:
        raise ConfigError(f"{path}: written by another version; remove it to start over")
    for name, begun in {"kind": state.get("kind", "eagle3"), **state["shape"]}.items():
        if (asked := getattr(options, name)) not in (None, begun):
            raise ConfigError(f"{name} = {asked}: training in {options.folder} began with {begun}")
    return state


def new_shape(target: ModelSpec, options: HeadOptions, corpus: Corpus) -> dict[str, int]:
    """Returns a new draft's shape. Raises ConfigError for an option that is impossible."""
    shape = {
        name: default(target, corpus) if (asked := getattr(options, name)) is None else asked
        for name, default in KINDS[options.kind].SHAPE.items()
    }
    if target.num_heads % shape["num_kv_heads"]:
        raise ConfigError(f"num_kv_heads = {shape['num_kv_heads']}: must divide {target.num_heads} heads")
    most = {"num_ids": target.vocab_size, "num_layers": target.num_layers, "block_size": MAX_BLOCK}
    for name, limit in {**most, "mask_id": target.vocab_size - 1}.items():
        if shape.get(name, 0) > limit:
            raise ConfigError(f"{name} = {shape[name]}: must be at most {limit}")
    return shape
