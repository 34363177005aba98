"""The policies that are measured, and the loads, as data: in this process, on a GPU and in virtual time.

A registered policy without an argument appears by itself. One that needs an argument is measured with the arguments
named here, or the report lists it as missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from faser_backend.core.errors import ConfigError
from faser_backend.policy.registry import FILE, USAGES

REFERENCE = "none"
FIXED_REFERENCE = "fixed:4"  # a typical fixed length
WHOLE = "faser"  # the full policy, with all mechanisms
POLICIES = ("none", "fixed:1", "fixed:2", "fixed:4", "fixed:8", "goodput", "survival", "gp-lcb", "faser")
ORACLE = "oracle"  # knows which tokens will be accepted; exists in simulations alone
STATIC = tuple(f"fixed:{length}" for length in range(1, 9))
SIMULATED = ("none", *STATIC, "goodput", "survival", "gp-lcb", "faser", ORACLE)
MAX_NUM_SEQS = 64  # saturates two cores; twice as many gain only a few percent


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy and the fields of EngineConfig that ablate it."""

    policy: str
    note: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.policy} ({self.note})" if self.note else self.policy


AGAIN = Contestant(REFERENCE, "again")  # a second engine of the reference shows by how much equal engines differ

# Each mechanism removed from the full policy, then each added to a policy that has none.
ABLATIONS = (
    Contestant(WHOLE, "no exit", {"early_exit": "off"}),
    Contestant(WHOLE, "no pipeline", {"pipeline": "serial"}),
    Contestant(FIXED_REFERENCE, "n-grams", {"draft": "ngram"}),
    Contestant(WHOLE, "n-grams", {"draft": "ngram"}),
    Contestant(FIXED_REFERENCE, "model+ngram", {"draft": "model+ngram"}),
    Contestant(WHOLE, "model+ngram", {"draft": "model+ngram"}),
    Contestant(FIXED_REFERENCE, "exits on", {"early_exit": "on"}),
    Contestant(FIXED_REFERENCE, "run-ahead", {"pipeline": "run_ahead"}),
    Contestant(FIXED_REFERENCE, "ping-pong", {"pipeline": "ping_pong"}),
)


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of num_clients; if that is 0, an open loop with arrivals over time."""

    name: str
    num_clients: int

    @property
    def is_open(self) -> bool:
        return self.num_clients == 0


BURSTY = Load("bursty", 0)
LOADS = (Load("low", 1), Load("middle", 8), Load("saturating", MAX_NUM_SEQS), BURSTY)


@dataclass(frozen=True, slots=True)
class Sizing:
    """The size of a benchmark."""

    repeats: int
    loop_s: float  # duration of one closed loop at the reference's speed
    min_waves: int  # minimum of a closed loop; a wave is as many requests as are in flight
    bursty_s: float
    max_tokens: int
    temperatures: tuple[float, ...]
    bursty_ablations: bool
    num_categories: int = 1  # of prompts; a closed loop has a job of each

    def waves_of(self, load: Load) -> int:
        """Returns the least number of waves of a closed loop."""
        return max(self.min_waves, -(-self.num_categories // load.num_clients))

    @classmethod
    def quick(cls) -> Sizing:
        return cls(3, 1.5, 1, 3.0, 40, (0.8,), bursty_ablations=False)

    @classmethod
    def full(cls) -> Sizing:
        return cls(3, 2.0, 2, 12.0, 100, (0.0, 0.8), bursty_ablations=True)


def taking_part(contestants: list[Contestant], load: Load, sizing: Sizing) -> list[Contestant]:
    """Returns all contestants; a short run leaves the ablations out of the bursty load, which takes real time."""
    if load.is_open and not sizing.bursty_ablations:
        return [contestant for contestant in contestants if not contestant.options]
    return contestants


def choose_contestants(listed: str | None, ladder: tuple[str, ...] = POLICIES) -> tuple[list[Contestant], list[str]]:
    """Returns the contestants to measure, and in words what is missing.

    None listed: the ladder with its ablations. Otherwise the reference, then the listed ones: names of policies, or of
    ablations as reports show them, separated by commas. Raises ConfigError for an unknown name.
    """
    if listed is not None:
        ablations = {contestant.name: contestant for contestant in ABLATIONS}
        names = dict.fromkeys([REFERENCE, *split_names(listed)])
        chosen = [ablations.get(name, Contestant(name)) for name in names]
        unknown = [c.name for c in chosen if _kind(c.policy) not in {*USAGES, *ladder, FILE}]
        if unknown:
            raise ConfigError(f"--policies = {','.join(unknown)!r}: unknown; known are {', '.join(USAGES.values())}")
        return chosen, []
    others = {kind: usage for kind, usage in USAGES.items() if kind not in map(_kind, ladder)}
    known = [*ladder, *(kind for kind, usage in others.items() if ":" not in usage)]
    missing = [f"{usage}: takes an argument; name one with --policies" for usage in others.values() if ":" in usage]
    return [*map(Contestant, known), *ABLATIONS], missing


def split_names(text: str) -> list[str]:
    """Splits a comma-separated list of contestants."""
    return [*filter(None, map(str.strip, text.split(",")))]


def _kind(spec: str) -> str:
    return spec.partition(":")[0]


def simulated_contestants(listed: str | None) -> tuple[list[Contestant], list[str]]:
    """Returns choose_contestants' result with all fixed lengths and the oracle, without policies that draft with
    n-grams: a simulated text has none. Raises ConfigError if the user named one of these."""
    chosen, missing = choose_contestants(listed, SIMULATED)
    others = [each.name for each in chosen if "ngram" in each.options.get("draft", "")]
    if others and listed is not None:
        raise ConfigError(f"--policies = {', '.join(others)!r}: n-grams need texts, which a simulation lacks")
    chosen = [each for each in chosen if each.name not in others]
    chosen.sort(key=lambda each: each.policy == ORACLE)  # last
    return chosen, [*missing, *(f"{name}: n-grams need texts, which a simulation lacks" for name in others)]
