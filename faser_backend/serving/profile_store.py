"""Reads and writes `profile.json`: fitted costs, chances of acceptance, and where they were measured.

A profile holds for one engine directory on one machine with one version. A profile of another is refused with the
differences. An engine without a profile gets the default cost model.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from faser_backend.core.errors import ConfigError
from faser_backend.device.runtime import ModelPair
from faser_backend.files import FileError, read_json
from faser_backend.manifest import EngineManifest, ModelEngine
from faser_backend.policy.calibration import KINDS, MARGIN_KNOTS, MarginCounts
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve, OverheadCost
from faser_backend.policy.early_exit import ExitCalibration
from faser_backend.policy.speculation import Knowledge
from faser_backend.serving.default_costs import ModelSize, default_cost_model
from faser_backend.serving.runtimes import identity_of, key_columns_of
from faser_backend.version import VERSION

FORMAT_VERSION = 5
PROFILE_FILE = "profile.json"
_SHOWN = {
    "cpu": "CPU",
    "num_cores": "usable cores",
    "gpu": "GPU",
    "num_sms": "SMs",
    "driver": "CUDA driver",
    "kv_cache_dtype": "KV cache",
    "compute": "products",
    "matrix_units": "matrix units",
}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The device, version and engine files that a profile holds for."""

    device: dict[str, str | int]  # facts of runtimes.identity_of, and the format of the KV cache
    faser: str
    files: dict[str, str]  # name -> sha256 of segments and weights, from the manifest

    @classmethod
    def here(cls, manifest: EngineManifest) -> Fingerprint:
        """Returns the fingerprint of this machine and an engine whose files the manifest has just verified."""
        files = {file.name: file.sha256 for file in manifest.files if file != manifest.tokenizer}
        device = {
            **identity_of(manifest.runtime),
            "kv_cache_dtype": manifest.kv_cache_dtype,
            "compute": manifest.compute,
        }
        return cls(device, VERSION, files)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Fingerprint:
        device = {name: value for name, value in fields.items() if name not in {"faser", "files"}}
        return cls(device, fields["faser"], dict(fields["files"]))

    def as_dict(self) -> dict[str, Any]:
        return {**self.device, "faser": self.faser, "files": self.files}

    def differences(self, other: Fingerprint) -> list[str]:
        """Returns the differences from `other` in words, none if the profile fits."""
        mine, others = ({**each.device, "faser": each.faser} for each in (self, other))
        found = [
            f"{_SHOWN.get(name, name)} {mine.get(name, 'unknown')} instead of {others.get(name, 'unknown')}"
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

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "num_fitted": self.num_fitted,
            "num_held_out": self.num_held_out,
            "margins": {
                "knots": MARGIN_KNOTS.tolist(),
                **{
                    kind: {"tested": counts.tested.tolist(), "accepted": counts.accepted.tolist()}
                    for kind, counts in self.margins.items()
                },
            },
            "exits": [{"calibration": asdict(each)} for each in self.exits],
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Calibration:
        """Reads the fields of as_dict. Raises KeyError, TypeError or ValueError for others."""
        return cls(
            source=str(fields["source"]),
            num_fitted=int(fields["num_fitted"]),
            num_held_out=int(fields["num_held_out"]),
            margins=_margins_from(fields["margins"]),
            exits=tuple(_exit_from(each["calibration"]) for each in fields["exits"]),
        )


def _margins_from(fields: dict[str, Any]) -> dict[str, MarginCounts]:
    if fields["knots"] != MARGIN_KNOTS.tolist():
        raise ValueError("margins were counted in other bins")
    return {kind: _counts_from(fields[kind]) for kind in KINDS}


def _counts_from(fields: dict[str, Any]) -> MarginCounts:
    tested, accepted = (np.array(fields[name], np.float64) for name in ("tested", "accepted"))
    if tested.shape != MARGIN_KNOTS.shape or accepted.shape != MARGIN_KNOTS.shape:
        raise ValueError(f"margins need {MARGIN_KNOTS.size} bins")
    if not (np.isfinite(tested).all() and (accepted >= 0).all() and (accepted <= tested).all()):
        raise ValueError("accepted tokens of a bin must lie between 0 and those tested")
    return MarginCounts(tested, accepted)


def _exit_from(fields: dict[str, Any]) -> ExitCalibration:
    exit_ = ExitCalibration(**{**fields, "pruned_shares": tuple(fields["pruned_shares"])})
    if not np.isfinite([exit_.bias, exit_.chance_weight, exit_.margin_weight]).all():
        raise ValueError(f"exit at layer {exit_.layer}: weights must be finite numbers")
    shares = (exit_.threshold, exit_.retention, exit_.trimmed_retention, exit_.trimmed_pruned_share)
    if not exit_.pruned_shares or not all(0.0 <= share <= 1.0 for share in (*shares, *exit_.pruned_shares)):
        raise ValueError(f"exit at layer {exit_.layer}: threshold and shares must lie in [0, 1]")
    return exit_


@dataclass(frozen=True, slots=True)
class Profile:
    """The content of profile.json. costs: (model, partition) -> cost per segment."""

    fingerprint: Fingerprint
    date: str
    costs: dict[tuple[str, str], tuple[CallCost, ...]]
    overhead: OverheadCost
    spread: float  # median over calls of the interquartile range over the median: the noise of the machine
    calibration: Calibration

    def save(self, engine_dir: Path) -> None:
        """Writes ENGINE_DIR/profile.json atomically, by a rename."""
        content = {
            "format_version": FORMAT_VERSION,
            "date": self.date,
            "fingerprint": self.fingerprint.as_dict(),
            "spread": self.spread,
            "overhead": asdict(self.overhead),
            "calibration": self.calibration.as_dict(),
            "costs": [
                {"model": model, "partition": partition, "segments": [asdict(cost) for cost in costs]}
                for (model, partition), costs in self.costs.items()
            ],
        }
        partial = engine_dir / f".{PROFILE_FILE}.{os.getpid()}"
        partial.write_text(json.dumps(content, default=np.ndarray.tolist) + "\n")
        os.replace(partial, engine_dir / PROFILE_FILE)


def load_profile(engine_dir: Path, manifest: EngineManifest) -> Profile:
    """Reads a profile. Raises ConfigError naming the error or difference, and the command that mends it."""
    path = Path(engine_dir) / PROFILE_FILE
    mend = f"run `faser profile {engine_dir}`"
    try:
        fields = read_json(path)
        found_version = fields["format_version"]
    except FileError as error:
        reason = error.reason if error.is_missing else f"not readable as a profile ({error.reason})"
        raise ConfigError(f"{path}: {reason}; {mend}") from None
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not readable as a profile ({type(error).__name__}: {error}); {mend}") from None
    if found_version != FORMAT_VERSION:
        raise ConfigError(f"{path}: format_version = {found_version!r}: this version reads {FORMAT_VERSION}; {mend}")
    try:
        profile = _profile_from(fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: malformed ({type(error).__name__}: {error}); {mend}") from None
    differences = profile.fingerprint.differences(Fingerprint.here(manifest))
    if differences:
        raise ConfigError(f"{path}: measured with {'; '.join(differences)}; {mend}")
    for name, model in _models(manifest).items():
        for (model_name, partition), costs in profile.costs.items():
            if model_name == name and len(costs) != len(model.segments):
                raise ConfigError(
                    f"{path}: {name} on {partition} has {len(costs)} segments instead of {len(model.segments)}; {mend}"
                )
        if (name, "whole") not in profile.costs:
            raise ConfigError(f"{path}: {name} on the whole machine is missing; {mend}")
    layers = {index: each.last_layer for index, each in enumerate(manifest.target.segments) if each.has_exit_scores}
    for each in profile.calibration.exits:
        if layers.get(each.segment) != each.layer:
            raise ConfigError(f"{path}: segment {each.segment} of the target has no exit at layer {each.layer}; {mend}")
    return profile


def load_knowledge(engine_dir: Path, manifest: EngineManifest) -> Knowledge:
    """Returns the profile's knowledge, or guesses without a profile. Raises ConfigError if it does not fit."""
    if not os.path.lexists(Path(engine_dir) / PROFILE_FILE):  # a broken link is an error
        sizes = map(_size_of, _models(manifest).values())
        return Knowledge(default_cost_model(*sizes, is_padded=is_padded(manifest)))
    profile = load_profile(engine_dir, manifest)
    calibration = profile.calibration
    return Knowledge(cost_model_of(profile, manifest), calibration.margins, calibration.exits)


def load_cost_model(engine_dir: Path, manifest: EngineManifest) -> CostModel:
    """Returns the costs of `load_knowledge` alone."""
    return load_knowledge(engine_dir, manifest).costs


def cost_model_of(profile: Profile, manifest: EngineManifest) -> CostModel:
    return CostModel(
        profile.costs, profile.overhead, key_columns(manifest), is_measured=True, is_padded=is_padded(manifest)
    )


def is_padded(manifest: EngineManifest) -> bool:
    """Returns whether attention pads all sequences of a call to the longest."""
    return manifest.runtime_spec.is_gathered


def key_columns(manifest: EngineManifest) -> np.ndarray:
    """Returns the columns of keys that a call reads, by the sequence's number of tokens [max_context + 1]."""
    max_context = ModelPair(manifest.target, manifest.draft).max_context
    columns = (key_columns_of(manifest.runtime, n, manifest.kv_block_size) for n in range(max_context + 1))
    return np.fromiter(columns, np.float64)


def _models(manifest: EngineManifest) -> dict[str, ModelEngine]:
    return dict(zip((TARGET, DRAFT), ModelPair(manifest.target, manifest.draft).present, strict=False))


def _profile_from(fields: dict[str, Any]) -> Profile:
    return Profile(
        fingerprint=Fingerprint.from_dict(fields["fingerprint"]),
        date=str(fields["date"]),
        costs={
            (str(entry["model"]), str(entry["partition"])): tuple(map(_call_cost_from, entry["segments"]))
            for entry in fields["costs"]
        },
        overhead=OverheadCost(**{name: float(_times_from(us)) for name, us in fields["overhead"].items()}),
        spread=float(fields["spread"]),
        calibration=Calibration.from_dict(fields["calibration"]),
    )


def _times_from(values: Any) -> np.ndarray:
    found = np.array(values, np.float64)
    if not np.isfinite(found).all() or (found < 0.0).any():
        raise ValueError("times must be non-negative numbers")
    return found


def _curve_from(fields: dict[str, Any]) -> Curve:
    knots, values_us = _times_from(fields["knots"]), _times_from(fields["values_us"])
    if knots.size < 2 or knots.shape != values_us.shape or (np.diff(knots) <= 0.0).any():
        raise ValueError("a curve needs at least 2 ascending knots, and as many values")
    if (np.diff(values_us) < 0.0).any():
        raise ValueError("values of a curve must never fall")
    return Curve(knots, values_us)


def _call_cost_from(fields: dict[str, Any]) -> CallCost:
    curves = {name: _curve_from(fields[name]) for name in ("rows", "keys")}
    rest: dict[str, Any] = {name: float(_times_from(value)) for name, value in fields.items() if name not in curves}
    return CallCost(**curves, **rest)


def _size_of(model: ModelEngine) -> ModelSize:
    spec = model.spec
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    return ModelSize(
        num_layers=tuple(segment.last_layer - segment.first_layer for segment in model.segments),
        layer_weights=attention + 3 * spec.hidden_size * spec.intermediate_size,
        head_weights=spec.hidden_size * spec.vocab_size,
    )
