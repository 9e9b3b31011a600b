"""What a comparison shows while it runs and when it ends."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offramp.cli.console import err
from offramp.commands.compare import Progress
from offramp.commands.report import report
from offramp.evaluation.collect import collect
from offramp.evaluation.tables import COLUMNS, lines


class Comparison:
    """Cells, time left and the table so far, live on a terminal; a line per cell elsewhere."""

    def __init__(self, out: str) -> None:
        self.out = Path(out)
        self.live = Live(console=err, refresh_per_second=1)

    def __enter__(self) -> Comparison:
        if err.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if err.is_terminal:
            self.live.stop()

    def tell(self, progress: Progress) -> None:
        """Called before every cell and at the end."""
        line = status(progress)
        if not err.is_terminal:
            err.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        self.live.update(Group(Text(line), so_far(self.out / "cells")))


def status(progress: Progress) -> str:
    """A line: how many cells, which one now, how long still."""
    ended = len(progress.done) + len(progress.collected)
    left = progress.seconds_left
    when = "" if left is None else f", about {left / 60:.0f} min left"
    broken = f", {len(progress.broken)} broken" if progress.broken else ""
    now = f": {progress.current}" if progress.current else ""
    return f"{ended} of {len(progress.cells)} cells{broken}{when}{now}"


def so_far(folder: Path) -> Table:
    """The table of what is finished."""
    table = Table("data", *COLUMNS)
    if folder.is_dir():
        for line in lines(collect(folder).entries):
            table.add_row(line.data, *line.cells)
    return table


def conclude(progress: Progress, out: str, console: Console) -> None:
    """The end: the table, what broke, what was collected, where the report is."""
    cells = Path(out) / "cells"
    if progress.done or progress.collected:
        console.print(so_far(cells))
        written = report(str(cells), out)[1]
        console.print(f"report: {written[0]}", markup=False, soft_wrap=True)
    for name, file in progress.collected.items():
        console.print(f"{name}: already in {file}, not run again", markup=False, soft_wrap=True)
    for name, why in progress.broken.items():
        console.print(f"broken: {name}: {why}", markup=False, soft_wrap=True, style="red")
    if progress.stopped:
        console.print(f"stopped by the time limit with {progress.left} cells left; go on with --resume")
