"""The learning curve as a picture: loss, and agreement by depth over held-out dialogues."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Losses = list[tuple[int, float]]
Checks = list[tuple[int, list[float], float]]


def draw_curve(path: Path, losses: Losses, checks: Checks) -> None:
    """losses: (rows learned from, nats); checks: (rows, agreement by depth, tokens kept)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot([rows / 1e6 for rows, _ in losses], [loss for _, loss in losses], linewidth=1)
    left.set(xlabel="rows learned from (millions)", ylabel="cross-entropy of depth 1 (nats)")
    at = [rows / 1e6 for rows, _, _ in checks]
    for depth in range(len(checks[0][1]) if checks else 0):
        right.plot(at, [shares[depth] for _, shares, _ in checks], label=f"depth {depth + 1}", linewidth=1)
    right.set(xlabel="rows learned from (millions)", ylabel="agreement with the target, held-out answers")
    if checks:
        right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
