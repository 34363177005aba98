"""Several loads at once, each for a moment in turn and by a clock of its own.

A shared machine is a tenth faster or slower from one second to the next. Of six engines alike, 8 requests each, one
came out at 0.87 to 1.16 times their mean when they ran one after the other (standard deviation 6.1 %), with turns of
0.25 s at 0.95 to 1.05 (2.6 %), with turns of 0.05 s at 0.98 to 1.02 (0.9 %).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TypeVar

TURN_S = 0.1  # some steps of the longest kind; what a turn finds cold is cold for everybody

T = TypeVar("T")


class OwnClock:
    """Nanoseconds that stand still while others have their turn."""

    def __init__(self) -> None:
        self._lag_ns = 0  # behind the machine's clock
        self._stopped_ns: int | None = None  # what the machine's clock said then; None: this one runs

    def now_ns(self) -> int:
        return (time.perf_counter_ns() if self._stopped_ns is None else self._stopped_ns) - self._lag_ns

    def now_s(self) -> float:
        return self.now_ns() / 1e9

    def stop(self) -> None:
        """Must run."""
        self._stopped_ns = time.perf_counter_ns()

    def go_on(self) -> None:
        """Must stand still."""
        assert self._stopped_ns is not None
        self._lag_ns += time.perf_counter_ns() - self._stopped_ns
        self._stopped_ns = None

    def skip(self, seconds: float) -> None:
        """Goes forward at once, where there is nothing to do but wait. Never backward."""
        self._lag_ns -= max(round(seconds * 1e9), 0)


def take_turns(
    runs: Mapping[str, Generator[float, None, T]],
    clocks: Mapping[str, OwnClock],
    on_turn: Callable[[float], None],
    turn_s: float = TURN_S,
) -> dict[str, T]:
    """What each run returns, in the order of `runs`. A run yields after each step which share of it is done.

    clocks: by which runs measure. on_turn: told the mean share after every turn.
    """
    results: dict[str, T] = {}
    done = dict.fromkeys(runs, 0.0)
    for name in runs:
        clocks[name].stop()
    try:
        while len(results) < len(runs):
            for name in [name for name in runs if name not in results]:
                clock = clocks[name]
                clock.go_on()
                try:
                    until_s = clock.now_s() + turn_s
                    while clock.now_s() < until_s:
                        done[name] = next(runs[name])
                except StopIteration as end:
                    results[name], done[name] = end.value, 1.0
                finally:
                    clock.stop()
                on_turn(sum(done.values()) / len(done))
    finally:
        for name in runs:
            clocks[name].go_on()
    return {name: results[name] for name in runs}


def turn_orders(names: Sequence[str], repeats: int) -> Iterator[list[str]]:
    """The order of each repeat: another one begins every time, so that nobody always follows the same neighbour."""
    for repeat in range(repeats):
        first = repeat % max(len(names), 1)
        yield [*names[first:], *names[:first]]
