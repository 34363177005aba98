"""Options of `faser train-head`, each declared once: a field is an option of the command line and what training reads.
Knows no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Option


class Stage(StrEnum):
    WRITE = "write"
    TRAIN = "train"
    SAVE = "save"


class Precision(StrEnum):
    BF16 = "bf16"
    FP32 = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """num_ids, num_kv_heads, intermediate_size: None as training began, or the default."""

    target: Annotated[Path, Option(help="Target: a Hugging Face or TensorRT-LLM directory, or a GGUF file.")]
    output: Annotated[Path, Option(help="Directory of the head.")]
    work: Annotated[
        Path | None, Option(help="Data and checkpoints; kept, and gone on with.", show_default="OUTPUT.work")
    ] = None
    stage: Annotated[list[Stage] | None, Option(help="Run this stage alone; may be repeated.", show_default="all")] = (
        None
    )
    tokens: Annotated[int, Option(help="Tokens that the target writes, held-out ones included.")] = 1_000_000
    passes: Annotated[int, Option(help="Passes over the data.")] = 3
    new_data: Annotated[
        bool, Option("--new-data", help="A trained head goes on with what was written since, not with all.")
    ] = False
    num_ids: Annotated[int | None, Option(help="Draft vocabulary: the most frequent ids.", show_default="8192")] = None
    num_kv_heads: Annotated[int | None, Option(help="Of the head.", show_default="the target's")] = None
    intermediate_size: Annotated[int | None, Option(help="Of the head.", show_default="the target's")] = None
    chain_length: Annotated[int, Option(help="Steps that each row drafts in training.")] = 3
    tokens_per_step: Annotated[int, Option(help="Tokens of a training step.")] = 2048
    matrix_rate: Annotated[float, Option(help="Learning rate of the layer's matrices (Muon).")] = 2e-3
    rate: Annotated[float, Option(help="Learning rate of the rest (AdamW).")] = 5e-4
    decay_share: Annotated[float, Option(help="Share of the steps in which rates fall to zero.")] = 0.5
    num_slots: Annotated[int, Option(help="Conversations that are written side by side.")] = 64
    num_threads: Annotated[int | None, Option(help="CPU threads.", show_default="all cores")] = None
    processes: Annotated[
        int, Option(min=1, help="Training processes, which share threads and batches and average weights.")
    ] = 1
    device: Annotated[str, Option(help="Of training: cpu, cuda, or auto.")] = "auto"
    precision: Annotated[Precision, Option(help="Of products in training.")] = Precision.BF16
    seed: Annotated[int, Option(help="Of data and training.")] = 0
    # No options of the command line:
    dialogues_per_shard: int = 64
    max_question: int = 192
    max_answer: int = 256
    num_columns: int = 3072  # logits that a step compares, 0 for all (sampled softmax, Jean et al. 2015)
    warmup_steps: int = 40
    report_every: int = 20
    check_every: int = 100  # steps between checkpoints, each with a check on held-out dialogues

    @property
    def folder(self) -> Path:
        """Of data and checkpoints."""
        return self.work or self.output.with_name(f"{self.output.name}.work")

    @property
    def dialogues(self) -> Path:
        return self.folder / "dialogues"

    @property
    def threads(self) -> int:
        available = len(os.sched_getaffinity(0))
        return min(self.num_threads or available, available)
