"""The cores that this process may use, and how many threads at a time compute on them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath


def usable_cores() -> int:
    """Return the number of cores that this process may use: those it may run on, or fewer under a quota of time.

    A container limited to two of 64 cores may run on all 64; 64 threads would only spend its share sooner.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, quota_cores() or cores)


@cache
def quota_cores(root: Path = Path("/")) -> int | None:
    """Return how many cores' time the process may use, rounded up; None where nothing limits it or nothing says so.

    Linux limits groups of processes, and a group also has the limits of those it lies in.
    """
    control = root / "sys/fs/cgroup"
    quotas: list[float] = []
    for line in _lines(root / "proc/self/cgroup"):  # "0::/own/group" of version 2, "4:cpu,cpuacct:/own/group" of 1
        _, names, group = [*line.split(":", 2), "", ""][:3]
        if not names:
            folders = [control, control / "unified"]
        elif "cpu" in names.split(","):
            folders = [control / names, control / "cpu"]
        else:
            continue
        path = PurePosixPath("/", group)
        for own in (path, *path.parents):  # in a container the files of its own group may lie at the top
            for folder in folders:
                quotas += _quota(folder.joinpath(*own.parts[1:]), version=1 if names else 2)
    return max(1, -int(-min(quotas) // 1)) if quotas else None


def _quota(folder: Path, version: int) -> list[float]:
    """Return the cores' time that one group may use, as a list of one; empty where it has no limit."""
    if version == 2:
        words = " ".join(_lines(folder / "cpu.max")).split()  # "150000 100000", or "max 100000"
    else:
        words = [word for name in ("quota", "period") for word in _lines(folder / f"cpu.cfs_{name}_us")]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:
        return []
    return [quota / period] if quota > 0 and period > 0 else []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []


class CoreTurns:
    """Lets as many threads compute at a time as there are cores; the others wait their turn.

    A model that is run step by step returns to Python after every small product, and gives the interpreter's lock away
    meanwhile. Eight threads that each want it back wait for each other at every step; two on two cores do not. A thread
    that has its turn keeps it when it wants another, so that a run within a run cannot block.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count = count or usable_cores()
        self._own = threading.local()
        self.free_all()

    def free_all(self) -> None:
        """Forget the turns that are held."""
        self._free = threading.BoundedSemaphore(self._count)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn and hold it."""
        if getattr(self._own, "held", False):
            yield
            return
        free = self._free
        with free:
            self._own.held = True
            try:
                yield
            finally:
                self._own.held = False


TURNS = CoreTurns()
if hasattr(os, "register_at_fork"):  # a child has none of the threads that hold turns of its parent
    os.register_at_fork(after_in_child=TURNS.free_all)
