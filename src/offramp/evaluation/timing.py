"""Times that can be compared on a machine that is not idle.

Work is cut into short calls, and every call runs with all variants in turn before the next one, so that a disturbance
affects all variants alike; the median over rounds removes it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Name = TypeVar("Name", bound=Hashable)
Call = TypeVar("Call")
TURN = 32  # calls of one variant before the next variant has its turn


def interleaved(
    work: Callable[[Name, Call], object], names: Sequence[Name], calls: Sequence[Call], rounds: int
) -> dict[Name, float]:
    """Return the seconds that each variant takes for all calls together. A first round warms up and does not count."""
    taken: dict[tuple[Name, int], list[float]] = {(name, index): [] for name in names for index in range(len(calls))}
    for number in range(rounds + 1):
        for index, call in enumerate(calls):
            first = (number + index) % len(names)  # so that no variant is always first, or always after the same one
            for name in [*names[first:], *names[:first]]:
                started = time.perf_counter()
                work(name, call)
                if number > 0:
                    taken[name, index].append(time.perf_counter() - started)
    return {name: sum(statistics.median(taken[name, index]) for index in range(len(calls))) for name in names}


def time_in_turns(
    work: Callable[[Name, Call], object],
    names: Sequence[Name],
    calls: Sequence[Call],
    rounds: int,
    tick: Callable[[], object] = lambda: None,
) -> dict[Name, NDArray[np.float64]]:
    """Return the seconds of every call in every round, for each variant.  [calls, rounds]

    Variants take turns of up to TURN calls, as a server would make them. One untimed call before each turn brings the
    variant's weights into the caches and lets the threads of the others go to sleep. `tick` is called after each turn.
    """
    taken = {name: np.zeros((len(calls), rounds)) for name in names}
    starts = range(0, len(calls), TURN)
    for number, (turn, start) in itertools.product(range(rounds), enumerate(starts)):
        first = (number + turn) % len(names)
        for name in [*names[first:], *names[:first]]:
            work(name, calls[start])
            for index in range(start, min(start + TURN, len(calls))):
                started = time.perf_counter()
                work(name, calls[index])
                taken[name][index, number] = time.perf_counter() - started
            tick()
    return taken


def turn_count(names: int, calls: int, rounds: int) -> int:
    """Return how often `time_in_turns` calls `tick`."""
    return names * rounds * -(-calls // TURN)
