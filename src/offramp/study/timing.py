"""Times that can be compared on a machine with other things to do.

Every round runs every job once, in turns that start at another job each round, so that a busy moment hits all alike;
speed-ups are ratios within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Times(Generic[Name]):
    """Seconds of each job in each round."""

    rounds: Mapping[Name, list[float]]

    def seconds(self, name: Name) -> float:
        """The median round."""
        return statistics.median(self.rounds[name])

    def speed_up(self, name: Name, over: Name) -> float:
        """How many times faster than another job: the median over rounds."""
        pairs = zip(self.rounds[over], self.rounds[name], strict=True)
        return statistics.median(slow / fast for slow, fast in pairs)


def interleaved(jobs: Mapping[Name, Callable[[], object]], rounds: int) -> Times[Name]:
    """Run all jobs once to warm up, then `rounds` times against the clock."""
    names = list(jobs)
    for name in names:
        jobs[name]()
    taken: dict[Name, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = time.perf_counter()
            jobs[name]()
            taken[name].append(time.perf_counter() - started)
    return Times(taken)
