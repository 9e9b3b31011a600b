"""Times that can be compared on a machine with other things to do.

Work is cut into short calls, and every call is made with all variants in turn before the next one, so that a busy
moment hits all alike; the median over rounds forgets it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Call = TypeVar("Call")


def interleaved(
    work: Callable[[Name, Call], object], names: Sequence[Name], calls: Sequence[Call], rounds: int
) -> dict[Name, float]:
    """Seconds each variant takes for all calls together. A first round warms up and does not count."""
    taken: dict[tuple[Name, int], list[float]] = {(name, index): [] for name in names for index in range(len(calls))}
    for number in range(rounds + 1):
        for index, call in enumerate(calls):
            first = (number + index) % len(names)  # nobody always comes first, or always after the same one
            for name in [*names[first:], *names[:first]]:
                started = time.perf_counter()
                work(name, call)
                if number > 0:
                    taken[name, index].append(time.perf_counter() - started)
    return {name: sum(statistics.median(taken[name, index]) for index in range(len(calls))) for name in names}
