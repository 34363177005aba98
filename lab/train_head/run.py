"""The stages of `faser train-head`: the target writes, the head learns, the head is saved. Each can be run again and
goes on where it stopped; writing and learning may go on side by side, in two processes."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engines.build import build_engines
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import ModelSpec
from faser_backend.manifest import MANIFEST_FILE
from lab.train_head.begin import TargetParts, TargetTensors, feature_layers, frequent_ids, head_spec, read_target
from lab.train_head.conversations import WritingOptions
from lab.train_head.crew import Crew, working_with
from lab.train_head.curve import draw_curve
from lab.train_head.dialogues import LlvmWriter, Writer, write_dialogues
from lab.train_head.export import head_config, save_head
from lab.train_head.measure import Agreement
from lab.train_head.shards import HELD_OUT_SHARDS, Corpus
from lab.train_head.torch_writer import TorchWriter, has_fast_halves, variant_of
from lab.train_head.training import STATE_FILE, Trainer, TrainingOptions

DEFAULT_NUM_IDS = 8192
SHAPE_FILE = "head.json"
CURVE_FILE = "curve.png"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """work: where data and checkpoints lie. None of a dimension: as training began, or the default."""

    target: Path
    output: Path
    work: Path
    num_tokens: int
    has_new_data_alone: bool = False
    num_ids: int | None = None
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    num_threads: int | None = None
    num_processes: int = 1  # that train
    device: str = "auto"
    precision: str = "bf16"
    writer: str = "auto"  # or llvm, torch
    training: TrainingOptions = field(default_factory=TrainingOptions)
    writing: WritingOptions = field(default_factory=WritingOptions)


class HeadRun:
    """One head of one target in one work folder."""

    def __init__(self, options: RunOptions) -> None:
        self._options, self._console = options, Console(stderr=True, highlight=False)
        self._dialogues = options.work / "dialogues"
        options.work.mkdir(parents=True, exist_ok=True)
        self.result: Agreement | None = None

    @cached_property
    def target(self) -> TargetParts:
        return read_target(self._options.target)

    def write(self) -> None:
        """Dialogues up to the wanted number of tokens, by an engine of the target that is built beside them."""
        options, engine_dir = self._options, self._options.work / "engine"
        if not (engine_dir / MANIFEST_FILE).exists():
            self._console.print(f"building the target's engine in {engine_dir}")
            build_engines(options.target, None, engine_dir, runtime="llvm")
        with self._bar("writing, tokens", options.num_tokens) as bar:
            write_dialogues(
                lambda seed: self._writer(engine_dir, seed),
                self._dialogues,
                num_tokens=options.num_tokens,
                dialogues_per_shard=options.writing.dialogues_per_shard,
                on_tokens=lambda total: bar.update(bar.task_ids[0], completed=min(total, options.num_tokens)),
            )

    def _writer(self, engine_dir: Path, seed: int) -> Writer:
        """The one that was asked for; else the one in torch where it is the faster one and knows the target."""
        options, spec, kind = self._options, self.target.spec, self._options.writer
        torch.set_num_threads(self._num_threads)
        if kind == "auto":
            kind = "torch" if variant_of(spec) is None and has_fast_halves() else "llvm"
        default = {"llvm": 64, "torch": 256}[kind]
        writing = replace(options.writing, num_slots=options.writing.num_slots or default)
        self._console.print(f"{writing.num_slots} conversations at once, writer {kind}")
        if kind == "torch":
            return TorchWriter(TargetTensors(options.target), engine_dir, feature_layers(spec), writing, seed=seed)
        return LlvmWriter(engine_dir, feature_layers(spec), writing, seed)

    @property
    def _num_threads(self) -> int:
        return self._options.num_threads or len(os.sched_getaffinity(0))

    def train(self) -> None:
        """Goes on with a plan that was cut off, or begins one over the data that there are."""
        options = self._options
        if options.num_processes > 1 and self._device == "cuda":
            raise ConfigError(f"num_processes = {options.num_processes}: on cuda a head trains in one process")
        crew = Crew(0, options.num_processes)
        trainer = self.trainer(crew)
        if trainer.is_done:
            trainer.go_on(self._frequent_ids(trainer.corpus), new_alone=options.has_new_data_alone)
        trainer.save()  # where the others begin
        with working_with(crew, partial(_learn, options)), self._bar("training, steps", None) as bar:

            def on_step(done: int, total: int) -> None:
                bar.update(bar.task_ids[0], completed=done, total=total)

            self.result = trainer.run(on_step=on_step, on_check=lambda: self._draw(trainer))
        self._draw(trainer)

    def save(self) -> None:
        """The head of the last checkpoint, as a checkpoint of the public layout."""
        options, path = self._options, self._options.work / STATE_FILE
        if not path.exists():
            raise ConfigError(f"{path}: missing; run the stage train first")
        state = torch.load(path, map_location="cpu", weights_only=True)
        spec, target, token_ids = self._spec(), self.target.spec, state["token_ids"].numpy()
        config = head_config(spec, target, feature_layers(target), token_ids.size)
        num_bytes = save_head(options.output, config, state["head"], token_ids)
        self._console.print(f"saved {options.output} ({num_bytes / 1e6:.1f} MB)")

    @property
    def _device(self) -> str:
        if self._options.device != "auto":
            return self._options.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def trainer(self, crew: Crew) -> Trainer:
        """As the last checkpoint left it, or a new one."""
        options = self._options
        torch.set_num_threads(max(1, self._num_threads // options.num_processes))
        corpus = Corpus(self._dialogues)
        if len(corpus.shards) <= HELD_OUT_SHARDS:
            raise ConfigError(f"{self._dialogues}: {len(corpus.shards)} shards; the stage write has to make more first")
        return Trainer(
            self.target,
            self._spec(),
            self._frequent_ids(corpus),
            corpus,
            directory=options.work,
            options=options.training,
            device=self._device,
            dtype=DTYPES[options.precision],
            report=self._console.print if crew.leads else lambda line: None,
            crew=crew,
        )

    @cached_property
    def _shape(self) -> dict[str, int]:
        """num_ids, num_kv_heads and intermediate_size as training began, or as it is to begin.

        Raises ConfigError where an option asks for others than it began with.
        """
        options, target, path = self._options, self.target.spec, self._options.work / SHAPE_FILE
        defaults = {
            "num_ids": min(DEFAULT_NUM_IDS, target.vocab_size),
            "num_kv_heads": target.num_kv_heads,
            "intermediate_size": target.intermediate_size,
        }
        asked = {name: value for name in defaults if (value := getattr(options, name)) is not None}
        if not path.exists():
            shape = defaults | asked
            if target.num_heads % shape["num_kv_heads"]:
                raise ConfigError(f"num_kv_heads = {shape['num_kv_heads']}: must divide {target.num_heads} heads")
            if not 0 < shape["num_ids"] <= target.vocab_size:
                raise ConfigError(f"num_ids = {shape['num_ids']}: must lie in [1, {target.vocab_size}]")
            path.write_text(json.dumps(shape) + "\n")
        found = json.loads(path.read_text())
        for name, value in asked.items():
            if value != found[name]:
                raise ConfigError(f"{name} = {value}: training in {options.work} began with {found[name]}")
        return found

    def _spec(self) -> ModelSpec:
        return head_spec(self.target.spec, self._shape["num_kv_heads"], self._shape["intermediate_size"])

    def _frequent_ids(self, corpus: Corpus) -> np.ndarray:
        said = np.concatenate([shard.token_ids() for shard in corpus.shards[HELD_OUT_SHARDS:]])
        return frequent_ids(said, self.target.spec.vocab_size, self._shape["num_ids"])

    def _draw(self, trainer: Trainer) -> None:
        draw_curve(self._options.work / CURVE_FILE, trainer.progress.losses, trainer.progress.checks)

    def _bar(self, what: str, total: int | None) -> AbstractContextManager[Progress]:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
        bar.add_task(what, total=total)
        return bar


def _learn(options: RunOptions, crew: Crew) -> None:
    HeadRun(options).trainer(crew).learn()
