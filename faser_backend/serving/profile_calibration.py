"""Results of calibration, as `profile.json` holds it: read back with suspicion, like all of that file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from faser_backend.policy.calibration import KINDS, MARGIN_KNOTS, MarginCounts
from faser_backend.policy.early_exit import ExitCalibration


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Held-out tested tokens of one bin of draft margins: mean predicted and observed chance."""

    margin: float  # where the bin starts
    predicted: float
    observed: float
    num_tested: int


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """A pair's chances of acceptance, as policies read them, and how well they hold on texts that were not fitted."""

    source: str  # of the texts
    num_fitted: int  # tested draft tokens
    num_held_out: int
    margins: dict[str, MarginCounts]  # of the fitted half, by kind of request
    reliability: tuple[ReliabilityBin, ...]
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
            "reliability": [asdict(each) for each in self.reliability],
            "exits": [{"calibration": asdict(each)} for each in self.exits],
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Calibration:
        """Raises KeyError, TypeError or ValueError where the fields are not those of as_dict."""
        return cls(
            source=str(fields["source"]),
            num_fitted=int(fields["num_fitted"]),
            num_held_out=int(fields["num_held_out"]),
            margins=_margins_from(fields["margins"]),
            reliability=tuple(ReliabilityBin(**each) for each in fields["reliability"]),
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
    return ExitCalibration(**{**fields, "pruned_shares": tuple(fields["pruned_shares"])})
