"""A progress bar on standard error for whatever takes longer than a moment; nothing where nobody looks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from offramp.utils.progress import watched

PATIENCE = 1.0  # seconds before a bar appears


class Bar:
    """Adds up what several passes over rows tell."""

    def __init__(self, what: str, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        self.progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self.what, self.started = what, time.monotonic()
        self.task: TaskID | None = None
        self.before = self.last = 0  # done in earlier passes, done in this one

    def tell(self, done: int, total: int) -> None:
        """Called from within the work."""
        if done < self.last:
            self.before += self.last
        self.last = done
        if self.task is None:
            if time.monotonic() - self.started < PATIENCE:
                return
            self.progress.start()
            self.task = self.progress.add_task(self.what)
        self.progress.update(self.task, completed=self.before + done, total=self.before + total)

    def close(self) -> None:
        """The bar goes; what was printed stays."""
        if self.task is not None:
            self.progress.stop()


@contextmanager
def bar(what: str, quiet: bool = False) -> Iterator[None]:
    """Within the block long work shows how far it is, if standard error is a terminal."""
    console = Console(stderr=True)
    made = Bar(what, console) if console.is_terminal and not quiet else None
    with watched(made.tell) if made else nullcontext():
        try:
            yield
        finally:
            if made:
                made.close()


def answers_on_screen(output: str | None) -> bool:
    """Whether predictions go to the same terminal a bar would be drawn on."""
    return output is None and sys.stdout.isatty()
