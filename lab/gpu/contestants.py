"""Who is measured on a GPU and how much of it, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

REFERENCE, FIXED, WHOLE_POLICY = "none", "fixed:4", "faser"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy, and the fields of EngineConfig that make it an ablation."""

    policy: str
    note: str = ""
    options: dict[str, str] = field(default_factory=dict)
    is_rival: bool = False  # takes part in the bursty load

    @property
    def name(self) -> str:
        return f"{self.policy} ({self.note})" if self.note else self.policy


# In the order in which they are measured where time is short.
CONTESTANTS = (
    Contestant(REFERENCE, is_rival=True),
    Contestant(FIXED, is_rival=True),
    Contestant(WHOLE_POLICY, is_rival=True),
    Contestant("survival", is_rival=True),
    Contestant("goodput", is_rival=True),
    Contestant("fixed:2"),
    Contestant(WHOLE_POLICY, "no exit", {"early_exit": "off"}),
    Contestant(WHOLE_POLICY, "no pipeline", {"pipeline": "serial"}),
    Contestant(FIXED, "run-ahead", {"pipeline": "run_ahead"}),
    Contestant(FIXED, "ping-pong", {"pipeline": "ping_pong"}),
    Contestant(FIXED, "exits on", {"early_exit": "on"}),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a ladder. Lengths of the bursty load are log-normal around the same medians."""

    clients: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    waves: int
    repeats: int
    bursty_s: float
    temperature: float = 0.8
