"""The command `faser train-head`: its options. The work is in `run`, which needs torch."""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from faser_backend.core.errors import ConfigError
from lab.train_head.options import HeadOptions


class Stage(StrEnum):
    WRITE = "write"
    TRAIN = "train"
    SAVE = "save"


class Precision(StrEnum):
    BF16 = "bf16"
    FP32 = "fp32"


def train_head(
    *,
    target: Annotated[Path, typer.Option(help="Target: a Hugging Face or TensorRT-LLM directory, or a GGUF file.")],
    output: Annotated[Path, typer.Option(help="Directory of the head.")],
    work: Annotated[
        Path | None, typer.Option(help="Data and checkpoints; kept, and gone on with.", show_default="OUTPUT.work")
    ] = None,
    stage: Annotated[
        list[Stage] | None, typer.Option(help="Run this stage alone; may be repeated.", show_default="all")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens that the target writes, held-out ones included.")] = 1_000_000,
    passes: Annotated[int, typer.Option(help="Passes over the data.")] = 3,
    new_data: Annotated[
        bool, typer.Option("--new-data", help="A trained head goes on with what was written since, not with all.")
    ] = False,
    num_ids: Annotated[
        int | None, typer.Option(help="Draft vocabulary: the most frequent ids.", show_default="8192")
    ] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Of the head.", show_default="the target's")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Of the head.", show_default="the target's")] = None,
    chain_length: Annotated[int, typer.Option(help="Steps that each row drafts in training.")] = 3,
    tokens_per_step: Annotated[int, typer.Option(help="Tokens of a training step.")] = 2048,
    matrix_rate: Annotated[float, typer.Option(help="Learning rate of the layer's matrices (Muon).")] = 2e-3,
    rate: Annotated[float, typer.Option(help="Learning rate of the rest (AdamW).")] = 5e-4,
    decay_share: Annotated[float, typer.Option(help="Share of the steps in which rates fall to zero.")] = 0.5,
    num_slots: Annotated[int, typer.Option(help="Conversations that are written side by side.")] = 64,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="all cores")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Training processes, which share threads and batches and average weights.")
    ] = 1,
    device: Annotated[str, typer.Option(help="Of training: cpu, cuda, or auto.")] = "auto",
    precision: Annotated[Precision, typer.Option(help="Of products in training.")] = Precision.BF16,
    seed: Annotated[int, typer.Option(help="Of data and training.")] = 0,
) -> None:
    """Train an EAGLE-3 head for a target, on conversations that the target writes itself."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("train-head needs torch: pip install 'faser-backend[train]'")
    from lab.train_head.run import save_trained, train, write

    options = HeadOptions(
        target=target,
        output=output,
        work=work or output.with_name(f"{output.name}.work"),
        num_tokens=tokens,
        passes=passes,
        has_new_data_alone=new_data,
        num_ids=num_ids,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        chain_length=chain_length,
        tokens_per_step=tokens_per_step,
        matrix_rate=matrix_rate,
        rate=rate,
        decay_share=decay_share,
        num_slots=num_slots,
        num_threads=num_threads,
        num_processes=processes,
        device=device,
        precision=precision.value,
        seed=seed,
    )
    for wanted in stage or list(Stage):
        {Stage.WRITE: write, Stage.TRAIN: train, Stage.SAVE: save_trained}[wanted](options)
