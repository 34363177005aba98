"""Muon for the matrices inside the blocks, AdamW for embeddings and norms, one linear-decay schedule.

Muon (K. Jordan, 2024): momentum, then the nearest orthogonal matrix by five Newton-Schulz steps.
"""

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


def decay_factor(step: int, num_steps: int, num_warmup: int = 30, flat_share: float = 0.5) -> float:
    """Learning-rate factor: short warm-up, flat, then linear to (almost) zero."""
    if step < num_warmup:
        return (step + 1) / num_warmup
    return min(1.0, (num_steps - step) / (num_steps * (1 - flat_share)))


class PairOptimizer:
    """Both optimizers of a model, stepped together on one schedule."""

    def __init__(self, model: nn.Module, num_steps: int, muon_lr: float, adam_lr: float, weight_decay: float = 0.0):
        inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        outer = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.num_steps = num_steps
        self.optimizers = [
            Muon(inner, muon_lr, weight_decay=weight_decay),
            torch.optim.AdamW(outer, adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]

    def step(self, step: int) -> None:
        factor = decay_factor(step, self.num_steps)
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
