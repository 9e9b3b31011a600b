"""Progress on standard error: bars and live pictures on a terminal, single lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from offramp.cli.printing.console import err, print_note
from offramp.utils.progress import progress_listener

if TYPE_CHECKING:
    from offramp.calibration.length_search import SearchProgress
    from offramp.commands.compare import ComparisonProgress
    from offramp.inference.operating_points import OperatingPoint

BAR_DELAY = 1.0  # seconds before a bar appears
WIDTH, HEIGHT = 64, 12  # of the picture of a search, in characters


class RowBar:
    """A bar over rows; several passes over the rows add up."""

    def __init__(self, title: str, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        self.progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self.title, self.started = title, time.monotonic()
        self.task: TaskID | None = None
        self.earlier = self.done = 0  # rows of earlier passes, rows of this one

    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` rows are finished; a smaller number than before begins another pass."""
        if done < self.done:
            self.earlier += self.done
        self.done = done
        if self.task is None:
            if time.monotonic() - self.started < BAR_DELAY:
                return
            self.progress.start()
            self.task = self.progress.add_task(self.title)
        self.progress.update(self.task, completed=self.earlier + done, total=self.earlier + total)

    def close(self) -> None:
        """Remove the bar from the screen."""
        if self.task is not None:
            self.progress.stop()


@contextmanager
def row_bar(title: str, quiet: bool = False) -> Iterator[None]:
    """Show a bar for the work inside the block, if standard error is a terminal and the work takes a while."""
    console = Console(stderr=True)
    bar = RowBar(title, console) if console.is_terminal and not quiet else None
    with progress_listener(bar.update) if bar else nullcontext():
        try:
            yield
        finally:
            if bar:
                bar.close()


def predictions_on_screen(output: str | None) -> bool:
    """Return whether predictions go to the terminal that a bar would be drawn on."""
    return output is None and sys.stdout.isatty()


class TrainingDisplay:
    """A bar for each stage with loss and time left, and a line for each epoch; only the first process prints."""

    def __init__(self) -> None:
        self.epochs = 1  # of each stage, reported with the rows
        self.first_process = int(os.environ.get("RANK", "0")) == 0
        counts = (TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TimeRemainingColumn())
        loss = TextColumn("loss {task.fields[loss]:.4f}")
        columns = (TextColumn("{task.description}"), BarColumn(), *counts, loss)
        self.progress = Progress(*columns, console=err, disable=not self.first_process)
        self.bars: dict[str, TaskID] = {}

    def __enter__(self) -> TrainingDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing; finished bars stay on the screen."""
        if self.bars:
            self.progress.stop()

    def report(self, **news: Any) -> None:
        """Print what training reports: a resumed run, its rows, a step, the end of an epoch, calibration."""
        if not self.first_process:
            return
        if news.get("done"):
            metrics = {k: v for k, v in news.items() if k not in ("done", "stage", "epoch", "loss")}
            listed = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            print_note(f"{news['stage']}, epoch {news['epoch']}: loss {news['loss']:.4f}, dev {listed}")
        elif "steps" in news:
            self._advance(news)
        elif "resuming" in news:
            print_note(f"going on with the unfinished run beside {news['resuming']}")
        elif "chosen_method" in news:
            print_note(f"method {news['chosen_method']}: {news['reason']}; --method full is plain fine-tuning")
        elif "trained_head" in news:
            kept = "`offramp attach` gives it exits and keeps its answers"
            print_note(f"{news['model']} is fine-tuned already ({news['trained_head']}) and is trained on; {kept}")
        elif "attaching" in news:
            self.close()
            print_note(f"attaching exits: one pass over {news['attaching']}")
        elif "choosing" in news:
            self.close()
            print_note(f"choosing operating points on {news['choosing']} rows")
        else:
            self.epochs = news["epochs"]
            cut = f", {news['cut']} truncated to {news['max_length']} tokens" if news["cut"] else ""
            print_note(f"{news['rows']} rows to train on, {news['dev']} to choose on{cut}")

    def _advance(self, news: dict[str, Any]) -> None:
        name, total = news["stage"], news["steps"] * self.epochs
        if not self.bars:
            self.progress.start()
        if name not in self.bars:
            self.bars[name] = self.progress.add_task(name, total=total, loss=0.0)
        done = news["epoch"] * news["steps"] + news["step"]
        self.progress.update(self.bars[name], completed=done, loss=news["loss"])


class BenchDisplay:
    """A bar for each phase of a benchmark."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=err)
        self.bar: TaskID | None = None

    def __enter__(self) -> BenchDisplay:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def phase(self, name: str, total: int) -> None:
        """Begin a phase of `total` steps."""
        self.bar = self.progress.add_task(name, total=total)

    def tick(self) -> None:
        """Count one step of the current phase."""
        if self.bar is not None:
            self.progress.advance(self.bar)


class LiveView:
    """A block of lines that is drawn anew with every update, on a terminal only."""

    def __init__(self, refresh_per_second: float, transient: bool) -> None:
        self.live = Live(console=err, refresh_per_second=refresh_per_second, transient=transient)

    def __enter__(self) -> Any:
        if err.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if err.is_terminal:
            self.live.stop()


class SearchDisplay(LiveView):
    """How far a search over lengths is, and its best points as they are found; elsewhere a line for each iteration."""

    def __init__(self, iterations: int) -> None:
        super().__init__(refresh_per_second=4, transient=True)
        self.iterations = iterations

    def searching(self, news: SearchProgress) -> None:
        """Show the state of the search after a configuration was tried."""
        state = f"iteration {news.iteration} of {self.iterations}, {news.left} to try; {len(news.found)} tried"
        shares = f"from {news.best[0].mac_share:.3f} to {news.best[-1].mac_share:.3f}"
        line = f"{state}, {len(news.best)} on the front {shares}"
        if err.is_terminal:
            tried = [point for one in news.found for point in one.points]
            self.live.update(Group(Text(line), Text(draw_front(news.best, tried))))
        elif news.left == 0:
            print_note(line)

    def scoring(self, done: int, total: int) -> None:
        """Show how many configurations of the front were scored on the rows that were not searched on."""
        if err.is_terminal:
            self.live.update(Text(f"scoring on the other rows: {done} of {total} configurations"))
        elif done == 0:
            print_note(f"scoring {total} configurations on the other rows")


def draw_front(best: list[OperatingPoint], tried: list[OperatingPoint]) -> str:
    """Return a picture of score against share of compute in characters: ● the front, · the other points."""
    points = [*tried, *best]
    (left, right), (low, high) = _range([p.mac_share for p in points]), _range([p.score for p in points])
    page = [[" "] * WIDTH for _ in range(HEIGHT)]
    for shown, mark in ((tried, "·"), (best, "●")):
        for point in shown:
            column, line = _cell(point.mac_share, left, right, WIDTH), _cell(point.score, low, high, HEIGHT)
            page[HEIGHT - 1 - line][column] = mark
    lines = ["".join(line).rstrip() for line in page]
    axis = [f"{high:8.4f} │", *["         │"] * (HEIGHT - 2), f"{low:8.4f} │"]
    drawn = [f"{edge} {line}" for edge, line in zip(axis, lines, strict=True)]
    scale = f"{'':10}{left:<.3f}{right:>{WIDTH - 5}.3f}  share of full MACs"
    return "\n".join([*drawn, f"{'':9}└{'─' * WIDTH}", scale])


def _range(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def _cell(value: float, low: float, high: float, cells: int) -> int:
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0


class ComparisonDisplay(LiveView):
    """Cells, time left and the results so far; elsewhere a line for each cell."""

    def __init__(self, out: str, table: Callable[[Path], RenderableType]) -> None:
        super().__init__(refresh_per_second=1, transient=False)
        self.cells, self.table = Path(out) / "cells", table

    def update(self, state: ComparisonProgress) -> None:
        """Show the state before a cell and at the end."""
        line = status_line(state)
        if not err.is_terminal:
            print_note(line)
            return
        self.live.update(Group(Text(line), self.table(self.cells)))


def status_line(state: ComparisonProgress) -> str:
    """Return how many cells are finished, which one runs and how long the rest will take."""
    ended = len(state.done) + len(state.collected)
    left = state.seconds_left
    when = "" if left is None else f", about {left / 60:.0f} min left"
    broken = f", {len(state.broken)} broken" if state.broken else ""
    now = f": {state.current}" if state.current else ""
    return f"{ended} of {len(state.cells)} cells{broken}{when}{now}"
