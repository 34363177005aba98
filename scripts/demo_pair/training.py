"""Training the target: cross-entropy on corpus windows, in steps, with checkpoints to resume from.

The plan is counted in steps, never in seconds, so that two runs see the same batches.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .corpus import WindowSampler
from .model import Llama, ModelShape
from .optim import PairOptimizer, Schedule

AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}
CHECKPOINT_EVERY = 100
REPORT_EVERY = 20


@dataclass(frozen=True)
class TrainPlan:
    """Steps of `tokens_per_step`; the last `num_long_steps` of them use windows twice as long.

    `decay_steps` lays the learning rate out for a longer run than `num_steps`, which then ends faster
    (`Schedule.stop_at`); 0 for the plain schedule.
    """

    num_steps: int
    decay_steps: int = 0
    num_long_steps: int = 0
    tokens_per_step: int = 8192
    tokens_per_pass: int = 4096  # one forward/backward; gradients are summed over a step
    window_len: int = 512
    muon_lr: float = 0.01
    adam_lr: float = 0.003
    weight_decay: float = 0.05

    def window_len_at(self, step: int) -> int:
        return self.window_len * (2 if step >= self.num_steps - self.num_long_steps else 1)


def save_model(model: Llama, path: Path) -> None:
    """Writes the fp32 weights as safetensors (whole or not at all)."""
    partial = path.with_suffix(".partial")
    save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, str(partial))
    partial.replace(path)


def load_model(shape: ModelShape, path: Path, max_len: int = 1024) -> Llama:
    model = Llama(shape, max_len)
    model.load_state_dict(load_file(str(path)))
    return model


class Checkpoint:
    """Everything needed to go on with a run: weights, optimizer state, sampler, step, seconds."""

    def __init__(self, build_dir: Path, name: str):
        self.weights = build_dir / f"{name}.safetensors"
        self.state = build_dir / f"{name}_state.pt"
        self.log = build_dir / f"{name}_log.jsonl"

    def save(self, step: int, seconds: float, model: Llama, optimizer: PairOptimizer, extra: dict) -> None:
        save_model(model, self.weights)
        state = {"step": step, "seconds": seconds, "extra": extra}
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        partial = self.state.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.state)

    def load(self, model: Llama, optimizer: PairOptimizer) -> tuple[int, float, dict]:
        """(next step, seconds spent, extra); (0, 0, {}) where there is no checkpoint."""
        if not self.state.exists():
            return 0, 0.0, {}
        state = torch.load(self.state, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["step"], state["seconds"], state["extra"]

    def report(self, **figures) -> None:
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in figures.items()})
        with self.log.open("a") as f:
            f.write(line + "\n")
        print(line, flush=True)


@torch.no_grad()
def held_out_loss(model: Llama, held_out: np.ndarray, num_windows: int = 32, window_len: int = 512) -> float:
    """Mean nats per token over the first windows of the held-out stream; a quick look, not the final figure."""
    rows = [held_out[i * window_len : (i + 1) * window_len + 1] for i in range(num_windows)]
    windows = torch.from_numpy(np.stack(rows).astype(np.int64))
    with torch.autocast(**AUTOCAST):
        return float(torch.stack([model.loss(part) for part in windows.split(8)]).mean())


def train_on_text(shape: ModelShape, plan: TrainPlan, build_dir: Path, name: str, seed: int) -> None:
    """Trains `name` on train.npy by cross-entropy; resumes from its checkpoint if there is one."""
    torch.manual_seed(seed)
    model = Llama(shape)
    optimizer = PairOptimizer(
        model,
        Schedule(plan.decay_steps or plan.num_steps, plan.num_steps * bool(plan.decay_steps)),
        plan.muon_lr,
        plan.adam_lr,
        plan.weight_decay,
    )
    checkpoint = Checkpoint(build_dir, name)
    first_step, seconds, extra = checkpoint.load(model, optimizer)
    sampler = WindowSampler(np.load(build_dir / "train.npy"), seed)
    sampler.restore(extra)
    held_out = np.load(build_dir / "held_out.npy")
    compiled_loss = torch.compile(model.loss, dynamic=False)
    started = time.monotonic() - seconds
    losses = []
    for step in range(first_step, plan.num_steps):
        losses.append(accumulate_step(compiled_loss, sampler, plan, step))
        optimizer.step(step)
        done = step + 1
        if done % REPORT_EVERY == 0:
            seconds = time.monotonic() - started
            checkpoint.report(step=done, seconds=seconds, loss=sum(losses) / len(losses))
            losses = []
        if done % CHECKPOINT_EVERY == 0 or done == plan.num_steps:
            checkpoint.save(done, time.monotonic() - started, model, optimizer, sampler.snapshot())
            checkpoint.report(step=done, held_out_loss=held_out_loss(model, held_out))


def accumulate_step(loss_of, sampler: WindowSampler, plan: TrainPlan, step: int) -> float:
    """Adds up the gradients of one step's passes; returns the mean loss in nats per token."""
    window_len = plan.window_len_at(step)
    num_passes = plan.tokens_per_step // plan.tokens_per_pass
    total = 0.0
    for _ in range(num_passes):
        windows = torch.from_numpy(sampler.next_batch(plan.tokens_per_pass // window_len, window_len))
        with torch.autocast(**AUTOCAST):
            loss = loss_of(windows)
        (loss / num_passes).backward()
        total += loss.item() / num_passes
    return total
