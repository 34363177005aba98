"""What calibration finds, as `profile.json` holds it: read back with suspicion, like all of that file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from faser_backend.policy.calibration import KINDS, MARGIN_KNOTS, MarginCounts
from faser_backend.policy.early_exit import ExitCalibration


class Replay(NamedTuple):
    """What rules would have done to chains, as shares. Saved: of the row-layers of full verification, anchors
    included. Kept: of the draft rows that turned out useful."""

    trim_saved: float
    trim_kept: float
    exit_saved: float
    exit_kept: float
    cascade_saved: float
    cascade_kept: float


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Held-out tested tokens of one bin of draft margins: mean predicted and observed chance."""

    margin: float  # where the bin starts
    predicted: float
    observed: float
    num_tested: int


@dataclass(frozen=True, slots=True)
class ExitReport:
    """An exit's calibration, and what it is worth on held-out chains. AUC: of telling accepted from rejected."""

    calibration: ExitCalibration
    margin_auc: float  # exit margin alone
    draft_auc: float  # draft margin alone
    both_auc: float
    replays: dict[int, Replay]  # by number of draft tokens


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """What policies learn of a pair's chances, and how well it holds on texts that were not fitted."""

    source: str  # of the texts
    retention: float  # that thresholds were chosen for
    num_fitted: int  # tested draft tokens
    num_held_out: int
    margins: dict[str, MarginCounts]  # of the fitted half, by kind of request
    reliability: tuple[ReliabilityBin, ...]
    exits: tuple[ExitReport, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "retention": self.retention,
            "num_fitted": self.num_fitted,
            "num_held_out": self.num_held_out,
            "margins": {
                "knots": MARGIN_KNOTS.tolist(),
                **{
                    kind: {"tested": counts.tested.tolist(), "accepted": counts.accepted.tolist()}
                    for kind, counts in self.margins.items()
                },
            },
            "reliability": [asdict(each) for each in self.reliability],
            "exits": [asdict(each) | {"replays": _replays_as_dict(each.replays)} for each in self.exits],
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Calibration:
        """Raises KeyError, TypeError or ValueError where the fields are not those of as_dict."""
        return cls(
            source=str(fields["source"]),
            retention=float(fields["retention"]),
            num_fitted=int(fields["num_fitted"]),
            num_held_out=int(fields["num_held_out"]),
            margins=_margins_from(fields["margins"]),
            reliability=tuple(ReliabilityBin(**each) for each in fields["reliability"]),
            exits=tuple(map(_exit_from, fields["exits"])),
        )


def _replays_as_dict(replays: dict[int, Replay]) -> dict[str, dict[str, float]]:
    return {str(length): each._asdict() for length, each in replays.items()}


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


def _exit_from(fields: dict[str, Any]) -> ExitReport:
    calibration = fields["calibration"]
    return ExitReport(
        ExitCalibration(**{**calibration, "pruned_shares": tuple(calibration["pruned_shares"])}),
        float(fields["margin_auc"]),
        float(fields["draft_auc"]),
        float(fields["both_auc"]),
        {int(length): Replay(**each) for length, each in fields["replays"].items()},
    )
