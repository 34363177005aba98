"""The stages of `faser train-head`: write data, train, save. Each can be repeated and resumes where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console

from faser_backend.core.errors import ConfigError
from faser_backend.engines.families import read_spec
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.files import read_json
from faser_backend.lab.progress import progress_bar
from faser_backend.lab.train_head.data import shard_paths
from faser_backend.lab.train_head.options import HeadOptions
from faser_backend.lab.train_head.target import Target
from faser_backend.lab.train_head.training import KINDS, Progress, Trainer, load_state
from faser_backend.lab.train_head.writing import write_dialogues
from faser_backend.serving.model_source import local_source

CURVE_FILE = "curve.png"
TARGET_FILE = "target.json"  # of the work folder


def write(options: HeadOptions) -> None:
    """Writes dialogues up to the wanted number of tokens."""
    target = open_target(options)
    with progress_bar() as bar:
        task = bar.add_task("writing, tokens", total=options.tokens)
        write_dialogues(options, target, lambda total: bar.update(task, completed=min(total, options.tokens)))


def train(options: HeadOptions) -> None:
    """Resumes an interrupted plan, or begins one over the available data."""
    trainer = Trainer(open_target(options), options, print_line)
    if trainer.is_done:
        trainer.go_on()
    with progress_bar() as bar:
        task = bar.add_task("training, steps", total=trainer.num_steps)
        trainer.run(
            lambda done: bar.update(task, completed=done),
            lambda: draw_curve(options.folder / CURVE_FILE, trainer.progress),
        )


def save_trained(options: HeadOptions) -> None:
    """Writes the draft of the last checkpoint in the public format."""
    check_target(options)
    state, target = load_state(options), read_spec(open_checkpoint(options.target).fields)
    num_bytes = KINDS[options.kind].save(options.output, target, state)
    print_line(f"saved {options.output} ({num_bytes / 1e6:.1f} MB)")


def open_target(options: HeadOptions) -> Target:
    """Loads the target on the chosen device, by default a GPU if there is one."""
    check_target(options)
    available = len(os.sched_getaffinity(0))
    torch.set_num_threads(min(options.num_threads or available, available))
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda': torch finds no GPU here")
    return Target(options.target, torch.device(device), is_exact=options.precision == "fp32")


def check_target(options: HeadOptions) -> None:
    """Records the target in the work folder. Raises ConfigError if data or checkpoints there are another's."""
    open_checkpoint(options.target)  # raises an error that names what is missing
    file, own = options.folder / TARGET_FILE, local_source(options.target.name, options.target)
    if not file.exists() or not shard_paths(options.dialogues):  # nothing depends on it yet
        options.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"target": own.name, "digest": own.digest}) + "\n")
    known = read_json(file)
    if known["digest"] != own.digest:
        raise ConfigError(
            f"target = {options.target} ({own.digest[:8]}): {options.folder} is that of {known['target']} "
            f"({known['digest'][:8]}); give another --work"
        )


def print_line(line: str) -> None:
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


def draw_curve(path: Path, progress: Progress) -> None:
    """Draws the loss, and on held-out dialogues the agreement by depth and, of blocks, by chance."""
    num_panels = 2 + bool(progress.bins)
    figure = Figure(figsize=(5 * num_panels, 4), layout="constrained")
    left, right, *last = figure.subplots(1, num_panels)
    left.plot([rows / 1e6 for rows, _ in progress.losses], [loss for _, loss in progress.losses], linewidth=1)
    left.set(xlabel="rows learned from (millions)", ylabel="cross-entropy of depth 1 (nats)")
    at, shares = [rows / 1e6 for rows, _, _ in progress.checks], [shares for _, shares, _ in progress.checks]
    right.plot(at, shares, label=[f"depth {depth}" for depth in range(1, len(shares[0]) + 1)], linewidth=1)
    right.set(xlabel="rows learned from (millions)", ylabel="agreement with the target, held-out answers")
    right.legend()
    for axes in last:
        num_tokens, given, agreed = np.transpose(progress.bins)
        axes.plot([0, 1], [0, 1], color="grey", linewidth=1, linestyle="dashed")
        axes.scatter(given, agreed, 400 * num_tokens / num_tokens.sum() + 5)
        axes.set(xlabel="chance that the draft gives, last check; area: tokens", ylabel="agreement with the target")
    figure.savefig(path, dpi=110)
