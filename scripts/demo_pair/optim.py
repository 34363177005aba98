"""Muon for the matrices inside the blocks, AdamW for embeddings and norms, one linear-decay schedule.

Muon (K. Jordan, 2024): momentum, then the nearest orthogonal matrix by five Newton-Schulz steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(grads: Tensor, num_steps: int = 5) -> Tensor:
    """Approximately U V^T for each of `grads` = U S V^T, `[count, rows, cols]`."""
    a, b, c = NEWTON_SCHULZ
    x = grads.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonalised updates; matrices of one shape are handled together."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for params in by_shape.values():
                self._step_shape(params, group)

    def _step_shape(self, params: list[nn.Parameter], group: dict) -> None:
        directions = []
        for p in params:
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - group["momentum"])
            directions.append(p.grad.lerp(buffer, group["momentum"]))
        rows, cols = params[0].shape
        scale = group["lr"] * max(1.0, rows / cols) ** 0.5
        for p, update in zip(params, orthogonalise(torch.stack(directions)), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


@dataclass(frozen=True)
class Schedule:
    """Learning-rate factor: a short warm-up, flat, then linear to zero over the second half of `num_steps`.

    With `stop_at`, training ends there, before `num_steps`, and the rate goes to zero faster over the
    last `num_final_steps`.
    """

    num_steps: int
    stop_at: int = 0
    num_final_steps: int = 250
    num_warmup: int = 30

    def factor(self, step: int) -> float:
        if step < self.num_warmup:
            return (step + 1) / self.num_warmup
        decay = min(1.0, 2 * (self.num_steps - step) / self.num_steps)
        if self.stop_at:
            decay *= min(1.0, (self.stop_at - step) / self.num_final_steps)
        return decay


class PairOptimizer:
    """Both optimizers of a model, stepped together on one schedule."""

    def __init__(self, model: nn.Module, schedule: Schedule, muon_lr: float, adam_lr: float, weight_decay: float = 0.0):
        inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        outer = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.schedule = schedule
        self.optimizers = [
            Muon(inner, muon_lr, weight_decay=weight_decay),
            torch.optim.AdamW(outer, adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]

    def step(self, step: int) -> None:
        factor = self.schedule.factor(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [o.state_dict() for o in self.optimizers]

    def load_state_dict(self, states: list[dict]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
