"""How long a benchmark will take, from a short look at the reference's speed; and less of it where that is too long.

Knows how much is measured (Sizing), nothing of engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lab.answers import Answer
from lab.contestants import LOADS, Contestant, Load, Sizing, taking_part

PROBE_TOKENS = 6
MIN_TOKENS = 8  # of an answer: shorter ones are prompts more than answers
TIMELINE_WAVES = 4
BURSTY_TRIAL_WAVES = 2


@dataclass(frozen=True, slots=True)
class Speed:
    """Of the reference under a load: seconds until all of a wave's requests have a token, and from each token on."""

    first_s: float
    token_s: float

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float) -> Speed:
        """From one wave of answers of several tokens each."""
        first_s = max(answer.response_s[0] - answer.start_s for answer in answers)
        num_tokens = max(len(answer.token_ids) for answer in answers)
        return cls(min(first_s, seconds), max(seconds - first_s, 0.0) / max(num_tokens - 1, 1))

    def wave_s(self, num_tokens: int) -> float:
        return self.first_s + self.token_s * (num_tokens - 1)


def load_s(load: Load, sizing: Sizing, contestants: list[Contestant], speeds: Mapping[str, Speed]) -> float:
    """Seconds that a load takes at one temperature, as if everybody were as fast as the reference. speeds: by name of
    a closed load."""
    num_runs = len(taking_part(contestants, load, sizing)) * (sizing.repeats_of(load) + 1)
    if load.is_open:
        trial_s = BURSTY_TRIAL_WAVES * speeds[closed_loads()[-1].name].wave_s(2 * sizing.max_tokens)
        return trial_s + num_runs * sizing.bursty_s
    wave_s = speeds[load.name].wave_s(sizing.max_tokens)
    return 1.25 * wave_s + num_runs * max(sizing.cell_s, sizing.min_waves * wave_s)


def timeline_s(sizing: Sizing, speeds: Mapping[str, Speed]) -> float:
    """Of one mode."""
    return TIMELINE_WAVES * speeds[closed_loads()[1].name].wave_s(sizing.max_tokens)


def estimate_s(
    sizing: Sizing, contestants: list[Contestant], speeds: Mapping[str, Speed], timeline_modes: int = 0
) -> float:
    """Seconds of all loads at all temperatures, and of timelines."""
    loads_s = sum(load_s(load, sizing, contestants, speeds) for load in LOADS)
    return len(sizing.temperatures) * loads_s + timeline_modes * timeline_s(sizing, speeds)


def fitted(
    sizing: Sizing,
    contestants: list[Contestant],
    speeds: Mapping[str, Speed],
    budget_s: float | None,
    timeline_modes: int = 0,
) -> Sizing:
    """The sizing, with shorter answers and then fewer repeats where it would take longer than budget_s."""
    if budget_s is None:
        return sizing
    tried = sizing
    for repeats in range(sizing.repeats, 0, -1):
        for share in (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1):
            tried = replace(
                sizing,
                repeats=repeats,
                bursty_repeats=min(repeats, sizing.bursty_repeats),
                max_tokens=max(round(share * sizing.max_tokens), min(MIN_TOKENS, sizing.max_tokens)),
                cell_s=share * sizing.cell_s,
                bursty_s=max(share, 0.5) * sizing.bursty_s,
                min_waves=sizing.min_waves if share == 1.0 else 1,
            )
            if estimate_s(tried, contestants, speeds, timeline_modes) <= budget_s:
                return tried
    return tried


def closed_loads() -> list[Load]:
    """Those that have a speed, the busiest last."""
    return sorted((load for load in LOADS if not load.is_open), key=lambda load: load.num_clients)


def in_minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
