"""The stages of `faser train-head`: write data, train, save. Each can be repeated and resumes where it stopped.

Writing and training may run side by side in two processes.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib

matplotlib.use("Agg")
import torch
import torch.distributed as dist
from matplotlib import pyplot as plt
from rich.console import Console
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.engines.build import build_engines
from faser_backend.lab.progress import progress_bar
from faser_backend.lab.train_head.checkpoint import feature_layers, head_spec, read_target, save_head
from faser_backend.lab.train_head.options import HeadOptions
from faser_backend.lab.train_head.training import Progress, Trainer, device_of, load_state
from faser_backend.lab.train_head.writing import write_dialogues
from faser_backend.manifest import MANIFEST_FILE

CURVE_FILE = "curve.png"
PATIENCE = timedelta(minutes=30)  # with the leader's checks and checkpoints


def write(options: HeadOptions) -> None:
    """Writes dialogues up to the wanted number of tokens, with an engine of the target built beside them."""
    options.folder.mkdir(parents=True, exist_ok=True)
    engine_dir = options.folder / "engine"
    if not (engine_dir / MANIFEST_FILE).exists():
        print_line(f"building the target's engine in {engine_dir}")
        build_engines(options.target, None, engine_dir, runtime="llvm")
    with progress_bar() as bar:
        task = bar.add_task("writing, tokens", total=options.tokens)
        write_dialogues(
            options,
            engine_dir,
            feature_layers(read_target(options.target).spec),
            on_tokens=lambda total: bar.update(task, completed=min(total, options.tokens)),
        )


def train(options: HeadOptions) -> None:
    """Resumes an interrupted plan, or begins one over the available data."""
    if options.processes > 1 and device_of(options) == "cuda":
        raise ConfigError(f"num_processes = {options.processes}: must be 1 on cuda")
    torch.set_num_threads(max(1, options.threads // options.processes))
    trainer = Trainer(read_target(options.target), options, print_line)
    if trainer.is_done:
        trainer.go_on()
    if options.processes == 1:
        _run(trainer, options)
        return
    trainer.save()  # the common start of all processes
    with TemporaryDirectory(prefix="faser-train-") as folder:
        try:
            spawn(train_together, (options, f"file://{folder}/store"), options.processes, daemon=True)
        except ProcessExitedException as error:
            raise FaserError(f"a training process ended with status {error.exit_code}; see its output above") from None
        except ProcessRaisedException as error:
            raise FaserError(f"a training process ended: {error}") from None


def train_together(rank: int, options: HeadOptions, store: str) -> None:
    """Runs one of several training processes, from the checkpoint on."""
    torch.set_num_threads(max(1, options.threads // options.processes))
    size = options.processes
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=PATIENCE)
    trainer = Trainer(read_target(options.target), options, print_line if rank == 0 else lambda line: None, rank)
    if rank == 0:
        _run(trainer, options)
    else:
        trainer.run()
    dist.barrier()  # waits for the leader's last check
    dist.destroy_process_group()


def save_trained(options: HeadOptions) -> None:
    """Writes the head of the last checkpoint in the public format."""
    state, target = load_state(options), read_target(options.target).spec
    spec = head_spec(target, state["shape"]["num_kv_heads"], state["shape"]["intermediate_size"])
    num_bytes = save_head(options.output, target, spec, state["head"], state["token_ids"])
    print_line(f"saved {options.output} ({num_bytes / 1e6:.1f} MB)")


def print_line(line: str) -> None:
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


def _run(trainer: Trainer, options: HeadOptions) -> None:
    with progress_bar() as bar:
        task = bar.add_task("training, steps", total=trainer.num_steps)
        trainer.run(
            lambda done: bar.update(task, completed=done),
            lambda: draw_curve(options.folder / CURVE_FILE, trainer.progress),
        )


def draw_curve(path: Path, progress: Progress) -> None:
    """Draws the loss and the agreement by depth on held-out dialogues."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot([rows / 1e6 for rows, _ in progress.losses], [loss for _, loss in progress.losses], linewidth=1)
    left.set(xlabel="rows learned from (millions)", ylabel="cross-entropy of depth 1 (nats)")
    at, shares = [rows / 1e6 for rows, _, _ in progress.checks], [shares for _, shares, _ in progress.checks]
    right.plot(at, shares, label=[f"depth {depth}" for depth in range(1, len(shares[0]) + 1)], linewidth=1)
    right.set(xlabel="rows learned from (millions)", ylabel="agreement with the target, held-out answers")
    right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
