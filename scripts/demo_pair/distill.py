"""Training the draft: a short start on text, then imitation of the target's distributions.

The target reads every training window once (`annotate`) and leaves its most likely tokens
and their log-probabilities on disk, so that the draft can pass over them many times cheaply.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .corpus import WindowSampler
from .model import DRAFT_SHAPE, TARGET_SHAPE, Llama
from .optim import PairOptimizer, Schedule
from .training import AUTOCAST, CHECKPOINT_EVERY, REPORT_EVERY, Checkpoint, load_model

NUM_TOP = 64  # the rest of the vocabulary is one bucket
TEXT_LEN = 1024


@dataclass(frozen=True)
class DistillPlan:
    """Steps of `tokens_per_step`; total variation joins the loss for the last `1 - tv_from` of them."""

    num_steps: int
    tokens_per_step: int = 4096
    muon_lr: float = 0.01
    adam_lr: float = 0.003
    tv_from: float = 0.6
    tv_weight: float = 1.0


@dataclass
class SoftSet:
    """Windows with the target's answers: ids `[rows, len]`, top ids and log-probs `[rows, len, NUM_TOP]`."""

    ids: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def open(cls, build_dir: Path, name: str, num_rows: int = 0, row_len: int = 0) -> "SoftSet":
        """Memory-maps an existing set, or with `num_rows` creates one."""
        shapes = {
            "ids": (np.uint16, (num_rows, row_len)),
            "top_ids": (np.uint16, (num_rows, row_len, NUM_TOP)),
            "top_logprobs": (np.float16, (num_rows, row_len, NUM_TOP)),
        }
        arrays = {}
        for field, (dtype, shape) in shapes.items():
            path = build_dir / f"soft_{name}_{field}.npy"
            if num_rows:
                arrays[field] = np.lib.format.open_memmap(path, "w+", dtype, shape)
            else:
                arrays[field] = np.load(path, mmap_mode="r")
        return cls(**arrays)

    @property
    def num_tokens(self) -> int:
        return self.ids.size

    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, top ids, top log-probs) of some rows, ready for the loss."""
        rows = np.sort(rows)
        return (
            torch.from_numpy(self.ids[rows].astype(np.int64)),
            torch.from_numpy(self.top_ids[rows].astype(np.int64)),
            torch.from_numpy(self.top_logprobs[rows].astype(np.float32)),
        )


@torch.no_grad()
def annotate(target: Llama, windows: np.ndarray, build_dir: Path, name: str, batch_size: int) -> None:
    """Writes the soft set `name`: the target's `NUM_TOP` likeliest next tokens at each place of `windows`.

    `windows` `[rows, len]` has a multiple of `batch_size` rows.
    """
    soft = SoftSet.open(build_dir, name, *windows.shape)
    soft.ids[:] = windows
    compiled = torch.compile(target, dynamic=False)
    started = time.monotonic()
    for start in range(0, len(windows), batch_size):
        rows = slice(start, start + batch_size)
        with torch.autocast(**AUTOCAST):
            logits = compiled(torch.from_numpy(windows[rows].astype(np.int64))).float()
        values, ids = logits.topk(NUM_TOP, dim=-1, sorted=False)
        soft.top_ids[rows] = ids.numpy().astype(np.uint16)
        soft.top_logprobs[rows] = (values - logits.logsumexp(-1, keepdim=True)).numpy().astype(np.float16)
    speed = windows.size / (time.monotonic() - started)
    print(f"annotated {name}: {windows.size} tokens, {speed:.0f} tokens/s", flush=True)


def annotate_all(build_dir: Path, num_text_rows: int, seed: int) -> None:
    """The soft sets of the draft: the target's own samples, and windows of the corpus."""
    target = load_model(TARGET_SHAPE, build_dir / "target.safetensors")
    annotate(target, np.load(build_dir / "samples.npy"), build_dir, "samples", batch_size=8)
    sampler = WindowSampler(np.load(build_dir / "train.npy"), seed + 7)
    windows = sampler.next_batch(num_text_rows, TEXT_LEN)[:, :TEXT_LEN].astype(np.uint16)
    annotate(target, windows, build_dir, "text", batch_size=4)


def imitation_losses(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """(KL(target || draft), total variation), means per token, with the rest of the vocabulary as one bucket.

    `logits` `[..., vocab_size]` are the draft's, `top_*` `[..., NUM_TOP]` the target's.
    """
    draft = logits.float().log_softmax(-1).gather(-1, top_ids)
    target_probs, draft_probs = top_logprobs.exp(), draft.exp()
    target_rest = (1 - target_probs.sum(-1)).clamp_min(1e-5)
    draft_rest = (1 - draft_probs.sum(-1)).clamp_min(1e-5)
    kl = (target_probs * (top_logprobs - draft)).sum(-1) + target_rest * (target_rest.log() - draft_rest.log())
    tv = ((target_probs - draft_probs).abs().sum(-1) + (target_rest - draft_rest).abs()) / 2
    return kl.mean(), tv.mean()


class RowSchedule:
    """Which rows of which set each step reads: a seeded order, sets mixed by their number of tokens."""

    def __init__(self, sets: list[SoftSet], tokens_per_step: int, num_steps: int, seed: int):
        rng = np.random.default_rng(seed)
        steps: list[tuple[int, np.ndarray]] = []
        while len(steps) < num_steps:
            epoch = []
            for which, soft in enumerate(sets):
                num_rows, row_len = soft.ids.shape
                order = rng.permutation(num_rows)
                num_parts = num_rows * row_len // tokens_per_step
                epoch += [(which, part) for part in order.reshape(num_parts, -1)]
            steps += [epoch[i] for i in rng.permutation(len(epoch))]
        self.steps = steps[:num_steps]


def distill_draft(plan: DistillPlan, build_dir: Path, start: str, name: str, seed: int) -> None:
    """One cycle of imitation, from the weights `start` to the weights `name`; resumes."""
    draft = load_model(DRAFT_SHAPE, build_dir / f"{start}.safetensors")
    optimizer = PairOptimizer(draft, Schedule(plan.num_steps), plan.muon_lr, plan.adam_lr)
    checkpoint = Checkpoint(build_dir, name)
    first_step, seconds, _ = checkpoint.load(draft, optimizer)
    sets = [SoftSet.open(build_dir, name) for name in ("samples", "text")]
    schedule = RowSchedule(sets, plan.tokens_per_step, plan.num_steps, seed)

    def losses_of(ids: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        return imitation_losses(draft(ids), top_ids, top_logprobs)

    compiled = torch.compile(losses_of, dynamic=False)
    started, recent = time.monotonic() - seconds, []
    for step in range(first_step, plan.num_steps):
        which, rows = schedule.steps[step]
        with torch.autocast(**AUTOCAST):
            kl, tv = compiled(*sets[which].batch(rows))
        has_tv = step >= plan.tv_from * plan.num_steps
        (kl + plan.tv_weight * tv if has_tv else kl).backward()
        optimizer.step(step)
        recent.append((kl.item(), tv.item()))
        done = step + 1
        if done % REPORT_EVERY == 0:
            kl_mean, tv_mean = np.mean(recent, axis=0).tolist()
            checkpoint.report(step=done, seconds=time.monotonic() - started, kl=kl_mean, tv=tv_mean)
            recent = []
        if done % (5 * CHECKPOINT_EVERY) == 0 or done == plan.num_steps:
            checkpoint.save(done, time.monotonic() - started, draft, optimizer, {})
