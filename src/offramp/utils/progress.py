"""Progress of long work, reported to a listener if there is one.

The listener belongs to the context (thread, task) in which it was set, so that concurrent requests do not receive each
other's progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ProgressListener = Callable[[int, int], None]  # items done, items in all
_listener: ContextVar[ProgressListener | None] = ContextVar("progress_listener", default=None)


@contextmanager
def progress_listener(listener: ProgressListener) -> Iterator[None]:
    """Call `listener` for every report within the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(done: int, total: int) -> None:
    """Report that `done` of `total` items are done; a smaller number than before begins another piece of work."""
    listener = _listener.get()
    if listener is not None:
        listener(done, total)
