"""The cores that this process may use, and how many threads at a time compute on them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
