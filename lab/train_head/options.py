"""Options of `faser train-head`: name, type, default and help of each, declared once. Knows no torch."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from faser_backend.core.config import Option, OptionTable


class Stage(StrEnum):
    """A stage of training. Typer accepts no list of literals."""

    WRITE = "write"
    TRAIN = "train"
    SAVE = "save"


class HeadOptions(OptionTable):
    """num_ids, num_kv_heads, intermediate_size: None as training began, or the default."""

    target: Annotated[Path, Option("Target: a Hugging Face or TensorRT-LLM directory, or a GGUF file.")]
    output: Annotated[Path, Option("Directory of the head.")]
    work: Annotated[Path | None, Option("Folder of data and checkpoints, reused.", shown_default="OUTPUT.work")] = None
    stage: Annotated[list[Stage], Option("Run this stage alone; may be repeated.", shown_default="all")] = []  # noqa: RUF012
    tokens: Annotated[int, Option("Tokens that the target writes, held-out ones included.")] = 1_000_000
    passes: Annotated[int, Option("Passes over the data.")] = 3
    new_data: Annotated[
        bool, Option("A trained head goes on with what was written since, not with all.", flags="--new-data")
    ] = False
    num_ids: Annotated[int | None, Option("Draft vocabulary: the most frequent ids.", shown_default="8192")] = None
    num_kv_heads: Annotated[int | None, Option("Of the head.", shown_default="the target's")] = None
    intermediate_size: Annotated[int | None, Option("Of the head.", shown_default="the target's")] = None
    chain_length: Annotated[int, Option("Steps that each row drafts in training.")] = 3
    tokens_per_step: Annotated[int, Option("Tokens of a training step.")] = 2048
    matrix_rate: Annotated[float, Option("Learning rate of the layer's matrices (Muon).")] = 2e-3
    rate: Annotated[float, Option("Learning rate of the rest (AdamW).")] = 5e-4
    decay_share: Annotated[float, Option("Share of the steps in which rates fall to zero.")] = 0.5
    num_slots: Annotated[int, Option("Conversations that are written together.")] = 64
    num_threads: Annotated[int | None, Option("CPU threads.", shown_default="all cores")] = None
    processes: Annotated[
        int, Field(ge=1), Option("Training processes, which share threads and batches and average weights.")
    ] = 1
    device: Annotated[str, Option("Train on cpu, cuda, or auto.")] = "auto"
    precision: Annotated[Literal["bf16", "fp32"], Option("Precision of matrix products in training.")] = "bf16"
    seed: Annotated[int, Option("Seed of data and training.")] = 0
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
        """The folder of data and checkpoints."""
        return self.work or self.output.with_name(f"{self.output.name}.work")

    @property
    def dialogues(self) -> Path:
        return self.folder / "dialogues"

    @property
    def threads(self) -> int:
        available = len(os.sched_getaffinity(0))
        return min(self.num_threads or available, available)
