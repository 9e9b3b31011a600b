"""Long work tells how far it is to whoever watches; nobody does unless asked to.

The watcher is known to the context (thread, task) it was set in, so that concurrent requests never see each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ProgressListener = Callable[[int, int], None]  # done, of how many
_watcher: ContextVar[ProgressListener | None] = ContextVar("watcher", default=None)


@contextmanager
def progress_listener(watcher: ProgressListener) -> Iterator[None]:
    """Within the block `watcher` is told."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def report_progress(done: int, total: int) -> None:
    """So much of a piece of work is done; starting again from a smaller number means another piece."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(done, total)
