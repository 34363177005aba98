"""The options of `faser train-head`. Imports no torch, so that help appears at once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

from faser_backend.cli import options as shared
from faser_backend.core.config import EngineConfig, OptionTable, option
from faser_backend.core.errors import ConfigError

OF_OTHER_KIND = {"block": ("num_ids", "chain_length"), "eagle3": ("num_layers", "block_size", "mask_id")}
Stage = StrEnum("Stage", ["WRITE", "TRAIN", "SAVE"])  # typer accepts no list of literals
DEVICE = "num_threads device precision seed"
SHAPE = "kind num_ids num_layers block_size num_kv_heads intermediate_size mask_id"
TRAINING = "chain_length passes new_data tokens_per_step matrix_rate rate decay_share"
# Options that not all stages read, by stage.
READ = {"write": f"{DEVICE} tokens num_slots", "train": f"{DEVICE} {SHAPE} {TRAINING}", "save": SHAPE}


class HeadOptions(OptionTable):
    """The options. Of the shape (num_ids to mask_id), None keeps the checkpoint's value, or the default."""

    target: Path = option(..., shared.TARGET)
    output: Path = option(..., shared.OUTPUT)
    kind: Literal["eagle3", "block"] = option("eagle3", "Train an EAGLE-3 head, or a DFlash block drafter.")
    work: Path | None = option(None, "Keep data and checkpoints here, and resume from them.", unset="OUTPUT.work")
    stage: list[Stage] = option([], "Run only this stage; repeatable.", unset="all")
    tokens: int = option(1_000_000, "Let the target write this many tokens.", ge=1)
    passes: int = option(3, "Go over the data this many times.", ge=1)
    new_data: bool = option(False, "Continue a trained head on new data alone.", flags="--new-data")
    num_ids: int | None = option(None, "Limit the draft vocabulary to the most frequent ids.", unset="8192", ge=1)
    num_layers: int | None = option(None, "Give the block drafter this many layers.", unset="3", ge=1)
    block_size: int | None = option(None, "Set tokens per block, its first included.", unset="8", ge=2)
    num_kv_heads: int | None = option(None, "Give the draft this many KV heads.", unset="the target's", ge=1)
    intermediate_size: int | None = option(None, "Set the intermediate size of the draft.", unset="the target's", ge=1)
    mask_id: int | None = option(None, "Mask a block's tokens with this id.", unset="the last unused id", ge=0)
    chain_length: int | None = option(None, "Draft this many steps per row of a head.", unset="3", ge=1)
    tokens_per_step: int = option(2048, "Train on this many tokens per step.", ge=1)
    matrix_rate: float = option(2e-3, "Set the learning rate of matrices (Muon).", ge=0)
    rate: float = option(5e-4, "Set the learning rate of other weights (AdamW).", ge=0)
    decay_share: float = option(0.5, "Decay learning rates over this last share of steps.", ge=0, le=1)
    num_slots: int = option(64, "Write this many conversations together: 2048 on a large GPU.", ge=1)
    num_threads: int | None = option(None, EngineConfig.options()["num_threads"], section="Options")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Write and train on this device.")
    precision: Literal["bf16", "fp32"] = option("bf16", "Multiply matrices in this precision.")
    seed: int = option(0, shared.SEED, ge=0)
    # Not on the command line:
    dialogues_per_shard: int = 64
    max_question: int = 192
    max_answer: int = 256
    round_tokens: int = 768  # that a slot writes before a round's conversations are saved
    num_columns: int = 3072  # logits compared per step, 0 for all
    warmup_steps: int = 40
    report_every: int = 20
    check_every: int = 100  # steps between checkpoints, each with a check on held-out dialogues

    def check_use(self) -> None:
        """Raises ConfigError for an option that the kind, or none of the stages, reads."""
        stages = self.stage or [*Stage]
        read = " ".join(READ[stage] for stage in stages).split()
        others = (name for name in " ".join(READ.values()).split() if name not in read)
        unread = dict.fromkeys(others, f"stage {', '.join(stages)}")
        unread |= dict.fromkeys(OF_OTHER_KIND[self.kind], f"kind {self.kind}")
        for name, what in unread.items():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ConfigError(f"{name} = {value}: not an option of {what}")

    @property
    def folder(self) -> Path:
        """Returns the folder of data and checkpoints."""
        return self.work or self.output.resolve().with_suffix(f"{self.output.suffix}.work")

    @property
    def dialogues(self) -> Path:
        return self.folder / "dialogues"
