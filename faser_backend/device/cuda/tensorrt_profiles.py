"""Which optimisation profile of an engine takes a call: a choice by shapes alone.

An engine is compiled for ranges of shapes, one range per profile, and is fastest near the shapes that a
profile was tuned for. Knows nothing of TensorRT; `tensorrt_engine` reads the ranges off an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from faser_backend.core.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProfileRange:
    """The shapes that profile `index` takes, by input name."""

    index: int
    smallest: Mapping[str, Shape]
    largest: Mapping[str, Shape]

    def refusals(self, shapes: Mapping[str, Shape]) -> list[str]:
        """Why a call does not fit, input by input; empty where it fits."""
        found = []
        for name, low in self.smallest.items():
            shape, high = shapes[name], self.largest[name]
            fits = len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
            if not fits:
                found.append(f"{name} {list(shape)}: {list(low)} to {list(high)}")
        return found

    @property
    def size(self) -> int:
        """Elements of all inputs at their largest; pools, which no profile narrows, count alike everywhere."""
        return sum(prod(shape) for shape in self.largest.values())


def choose_profile(profiles: Sequence[ProfileRange], shapes: Mapping[str, Shape], engine: str) -> ProfileRange:
    """The tightest profile that takes the shapes; of equals the first.

    shapes: of every input, by name. Raises ConfigError naming the inputs that the closest profile refuses.
    """
    fitting = [profile for profile in profiles if not profile.refusals(shapes)]
    if fitting:
        return min(fitting, key=lambda profile: (profile.size, profile.index))
    closest = min((profile.refusals(shapes) for profile in profiles), key=len)
    raise ConfigError(f"{engine}: no profile takes a call with {'; '.join(closest)}; build for larger calls")


def profiles_of_share(profiles: Sequence[ProfileRange], indices: Sequence[int] | None) -> tuple[ProfileRange, ...]:
    """Those that were compiled for a share of the device; all where none was, or where profiles know of no shares."""
    own = tuple(profile for profile in profiles if indices is not None and profile.index in indices)
    return own or tuple(profiles)
