"""The options of `faser train-head` as one value. Knows no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Fields from dialogues_per_shard on have no option of the command line. num_ids, num_kv_heads, intermediate_size:
    None as training began, or the default."""

    target: Path
    output: Path
    work: Path  # of data and checkpoints
    num_tokens: int = 1_000_000
    passes: int = 3
    has_new_data_alone: bool = False
    num_ids: int | None = None
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    chain_length: int = 3
    tokens_per_step: int = 2048
    matrix_rate: float = 2e-3  # of Muon, scaled as AdamW's
    rate: float = 5e-4  # of AdamW, for norms and the head's rows
    decay_share: float = 0.5  # of the steps, at the end, in which rates fall to zero
    num_slots: int = 64  # conversations that are written side by side
    num_threads: int | None = None
    num_processes: int = 1  # that train
    device: str = "auto"
    precision: str = "bf16"  # or fp32
    seed: int = 0
    dialogues_per_shard: int = 64
    max_question: int = 192
    max_answer: int = 256
    num_columns: int = 3072  # logits that a step compares, 0 for all (sampled softmax, Jean et al. 2015)
    warmup_steps: int = 40
    report_every: int = 20
    check_every: int = 100  # steps between checkpoints, with a check on held-out dialogues

    @property
    def dialogues(self) -> Path:
        return self.work / "dialogues"

    @property
    def threads(self) -> int:
        available = len(os.sched_getaffinity(0))
        return min(self.num_threads or available, available)
