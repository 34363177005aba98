"""Reads and writes `profile.json`: fitted costs, chances of acceptance, and where they were measured.

A profile holds for one engine directory on one machine with one version. A profile of another is refused with the
differences, and one that was edited or damaged by its hash. An engine without a profile gets the default cost model.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.device.runtime import ModelPair
from faser_backend.files import FileError, read_json
from faser_backend.manifest import EngineManifest, ModelEngine
from faser_backend.policy.calibration import MarginCounts
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, Calls, CostModel, Curve, OverheadCost
from faser_backend.policy.early_exit import ExitCalibration
from faser_backend.policy.speculation import Knowledge
from faser_backend.serving.runtimes import identity_of
from faser_backend.version import VERSION

FIRST_CALL_EXTRA = 0.2  # of a draft call: a guess on the low side, on the demo pair 0.8
FLOPS_PER_US, BYTES_PER_US, LAYER_US = 20e3, 5e3, 20.0  # 20 GFLOP/s, 5 GB/s, dispatch of a layer's operators
# Microseconds on one core per token of a chain, with 2 to 4 tokens looked up at once, and more than a token takes to be
# read (docs/drafts.md).
CALL_US, TOKEN_US = 5.0, 5.0


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of an engine's model, for the default cost model."""

    num_layers: tuple[int, ...]  # of each segment
    layer_weights: int  # numbers in the matrices of one layer
    head_weights: int  # of the output head


def default_cost_model(target: ModelSize, draft: ModelSize | None = None, *, is_padded: bool = True) -> CostModel:
    """Returns the costs of an engine without a profile: one modest core, on which every row costs full price.

    Conservative: it has the whole machine as its only partition, so nothing is overlapped, and rows are never free.
    Rates are far below those of current cores. draft: the draft model, if one drafts.
    """
    segments = {(name, WHOLE): _segments(size) for name, size in ((TARGET, target), (DRAFT, draft)) if size}
    overhead = OverheadCost(200.0, 20.0, 10.0, 60.0, 10.0)
    costs = CostModel(segments, overhead, np.zeros(1), is_measured=False, is_padded=is_padded)
    if draft is None:
        return costs
    # The first call of a chain takes longer than further ones. Without this term the measured cost of short chains
    # would count against longer ones, and chains would get ever shorter.
    call_us = float(costs.call_us(DRAFT, WHOLE, 1, 1, 0)) + overhead.draft_us
    return replace(costs, overhead=replace(overhead, draft_round_us=FIRST_CALL_EXTRA * call_us))


def _segments(size: ModelSize) -> tuple[CallCost, ...]:
    costs = []
    for index, layers in enumerate(size.num_layers):
        head = size.head_weights if index == len(size.num_layers) - 1 else 0
        weights = layers * size.layer_weights
        fixed_us = layers * LAYER_US + 4 * (weights + head) / BYTES_PER_US
        costs.append(CallCost(_line(fixed_us, 2 * weights / FLOPS_PER_US), logit_row_us=2 * head / FLOPS_PER_US))
    return tuple(costs)


def with_ngrams(costs: CostModel) -> CostModel:
    """Returns the costs of an engine in which n-grams draft, with the whole device as its only partition."""
    segments = {(TARGET, WHOLE): costs.segments[TARGET, WHOLE], (DRAFT, WHOLE): (CallCost(_line(CALL_US, TOKEN_US)),)}
    step = costs.overhead
    overhead = OverheadCost(step.step_us, step.step_sequence_us, step.step_row_us, 0.0, 0.0)
    return replace(costs, segments=segments, overhead=overhead, drafts_at_once=False, num_idle=None)


def _line(first_us: float, row_us: float) -> Curve:
    return Curve.from_slopes(np.zeros(1), first_us, np.array([row_us]))


FORMAT_VERSION = 6  # of the file, and of the bins of its margins
PROFILE_FILE = "profile.json"
MIN_TABLE_BLOCKS = 8  # a GPU's block tables have 8, 16, 32, ... columns


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The device, version and engine files that a profile holds for."""

    device: dict[str, str | int]  # facts of runtimes.identity_of, and how the engine was built
    faser: str
    files: dict[str, str]  # name -> sha256 of segments and weights, from the manifest

    @classmethod
    def here(cls, manifest: EngineManifest) -> Fingerprint:
        """Returns the fingerprint of this machine and an engine whose files the manifest has just verified."""
        files = {file.name: file.sha256 for file in manifest.files if file != manifest.tokenizer}
        own = {"kv_cache_dtype": manifest.kv_cache_dtype, "compute": manifest.compute}
        device = identity_of(manifest.runtime) | own
        if manifest.exit_layers:
            device["exit_layers"] = ",".join(map(str, manifest.exit_layers))
        return cls(device, VERSION, files)

    def differences(self, other: Fingerprint) -> list[str]:
        """Returns the differences from `other` in words, none if the profile fits."""
        mine, others = ({**each.device, "faser": each.faser} for each in (self, other))
        found = [
            f"{name} {mine.get(name, 'unknown')} instead of {others.get(name, 'unknown')}"
            for name in mine | others
            if mine.get(name) != others.get(name)
        ]
        changed = sorted(name for name in self.files | other.files if self.files.get(name) != other.files.get(name))
        return found + ([f"other engine files ({', '.join(changed)})"] if changed else [])


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """A pair's chances of acceptance, and the value of its exits on held-out texts."""

    source: str  # of the texts
    num_fitted: int  # tested draft tokens
    num_held_out: int
    margins: dict[str, MarginCounts]  # of the fitted half, by kind of request
    exits: tuple[ExitCalibration, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """The content of profile.json. costs: (model, partition) -> cost per segment."""

    fingerprint: Fingerprint
    date: str
    costs: dict[tuple[str, str], tuple[CallCost, ...]]
    overhead: OverheadCost
    spread: float  # median over calls of the interquartile range over the median: the noise of the machine
    calibration: Calibration
    warnings: tuple[str, ...] = ()  # of the measurement, for the user

    def save(self, engine_dir: Path) -> None:
        """Writes ENGINE_DIR/profile.json atomically, by a rename."""
        fields = asdict(self)
        fields["costs"] = [(*key, costs) for key, costs in fields["costs"].items()]
        text = json.dumps(fields, default=np.ndarray.tolist)
        partial = engine_dir / f".{PROFILE_FILE}.{os.getpid()}"
        head = {"format_version": FORMAT_VERSION, "sha256": _sha256(text)}
        partial.write_text(json.dumps(head | {"profile": json.loads(text)}) + "\n")
        os.replace(partial, engine_dir / PROFILE_FILE)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Profile:
        """Reads what `save` wrote."""
        chances = fields["calibration"]
        margins = {kind: MarginCounts(**_arrays(counts)) for kind, counts in chances["margins"].items()}
        exits = (each | {"pruned_shares": tuple(each["pruned_shares"])} for each in chances["exits"])
        chances |= {"margins": margins, "exits": tuple(ExitCalibration(**each) for each in exits)}
        return cls(
            fingerprint=Fingerprint(**fields["fingerprint"]),
            date=fields["date"],
            costs={(model, partition): tuple(map(_call_cost, costs)) for model, partition, costs in fields["costs"]},
            overhead=OverheadCost(**fields["overhead"]),
            spread=fields["spread"],
            calibration=Calibration(**chances),
            warnings=tuple(fields.get("warnings", ())),
        )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _arrays(fields: dict[str, list[float]]) -> dict[str, np.ndarray]:
    return {name: np.array(values, np.float64) for name, values in fields.items()}


def _call_cost(fields: dict[str, Any]) -> CallCost:
    curves: dict[str, Any] = {name: Curve(**_arrays(fields[name])) for name in ("rows", "keys")}
    return CallCost(**(fields | curves))


def load_profile(engine_dir: Path, manifest: EngineManifest) -> Profile:
    """Reads a profile. Raises ConfigError naming the error or difference, and the command that mends it."""
    path = Path(engine_dir) / PROFILE_FILE
    mend = f"run `faser profile {engine_dir}`"
    try:
        fields = read_json(path)
    except FileError as error:
        reason = error.reason if error.is_missing else f"not readable as a profile ({error.reason})"
        raise ConfigError(f"{path}: {reason}; {mend}") from None
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        raise ConfigError(f"{path}: format_version = {version!r}: this version reads {FORMAT_VERSION}; {mend}")
    if fields.get("sha256") != _sha256(json.dumps(fields.get("profile"))):
        raise ConfigError(f"{path}: changed since it was measured; {mend}")
    profile = Profile.from_fields(fields["profile"])
    differences = profile.fingerprint.differences(Fingerprint.here(manifest))
    if differences:
        raise ConfigError(f"{path}: measured with {'; '.join(differences)}; {mend}")
    return profile


def load_knowledge(engine_dir: Path, manifest: EngineManifest) -> Knowledge:
    """Returns the profile's knowledge, or guesses without a profile. Raises ConfigError if it does not fit."""
    if not os.path.lexists(Path(engine_dir) / PROFILE_FILE):  # a broken link is an error
        return Knowledge(_of_engine(manifest, default_cost_model(*map(_size_of, manifest.models.values()))))
    profile = load_profile(engine_dir, manifest)
    calibration = profile.calibration
    return Knowledge(cost_model_of(manifest, profile.costs, profile.overhead), calibration.margins, calibration.exits)


def cost_model_of(
    manifest: EngineManifest, costs: dict[Calls, tuple[CallCost, ...]], around: OverheadCost
) -> CostModel:
    """Returns the measured costs of an engine."""
    return _of_engine(manifest, CostModel(costs, around, key_columns(manifest), is_measured=True))


def _of_engine(manifest: EngineManifest, costs: CostModel) -> CostModel:
    """Returns the costs with the fields that the engine decides. A chain is drafted at once by a core.ports.DraftLoop,
    which runtimes of GPUs have, or by one call."""
    num_idle = None if manifest.draft is None else manifest.draft.spec.num_idle
    drafts_at_once = not manifest.runtime_spec.is_cpu or num_idle is not None
    return replace(costs, is_padded=manifest.runtime_spec.is_gathered, drafts_at_once=drafts_at_once, num_idle=num_idle)


def key_columns(manifest: EngineManifest) -> np.ndarray:
    """Returns the columns of keys that a call reads, by the sequence's number of tokens [max_context + 1]."""
    max_context = ModelPair(manifest.target, manifest.draft).max_context
    num_blocks = np.ceil(np.arange(max_context + 1) / manifest.kv_block_size)
    if manifest.runtime_spec.is_gathered:  # it reads all columns of the block table, not the allocated blocks alone
        num_blocks = 2 ** np.ceil(np.log2(np.maximum(num_blocks, MIN_TABLE_BLOCKS)))
    return num_blocks * manifest.kv_block_size


def _size_of(model: ModelEngine) -> ModelSize:
    spec = model.spec
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    return ModelSize(
        num_layers=tuple(segment.last_layer - segment.first_layer for segment in model.segments),
        layer_weights=attention + 3 * spec.hidden_size * spec.intermediate_size,
        head_weights=spec.hidden_size * spec.vocab_size,
    )
