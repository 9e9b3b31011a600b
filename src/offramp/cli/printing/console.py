"""The two consoles: results go to standard output, everything else to standard error."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

out = Console()
err = Console(stderr=True)
WIDEST = 100_000  # characters: no table is wider


def print_line(text: str) -> None:
    """Print a line of the result as it is: brackets in names are no markup, and long lines are not wrapped."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def print_note(text: str) -> None:
    """Print a line about the work, not about its result, to standard error."""
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(table: Table, drop: Sequence[str] = ()) -> None:
    """Print a table: on a terminal without the columns that do not fit, into a file or pipe whole.

    `drop` names the columns that are left out first; the others follow from the right, but never the first one.
    """
    if not out.is_terminal:
        Console(file=out.file, width=WIDEST, color_system=None).print(table)
        return
    fitting, dropped = fit_table(table, out.width, drop)
    out.print(fitting)
    if dropped:
        names = ", ".join(" ".join(name.split()) for name in dropped)
        print_note(f"left out, because the terminal is {out.width} columns wide: {names}")


def fit_table(table: Table, width: int, drop: Sequence[str] = ()) -> tuple[Table, list[str]]:
    """Return a table that fits into a width, and the names of the columns it lacks."""
    dropped: list[str] = []
    while len(table.columns) > 1 and _width(table) > width:
        names = [str(column.header) for column in table.columns[1:]]
        name = next((name for name in drop if name in names), names[-1])
        dropped.append(name)
        table = _without(table, name)
    return table, dropped


def _width(table: Table) -> int:
    """Return the least width in which nothing is cut: cells that may wrap are as wide as their longest word."""
    wide = Console(width=WIDEST)
    natural = Measurement.get(wide, wide.options, table).maximum
    return natural - sum(_longest(column, lines=True) - _longest(column) for column in table.columns if _wraps(column))


def _wraps(column: Column) -> bool:
    return not column.no_wrap


def _longest(column: Column, lines: bool = False) -> int:
    """Return the width of a column's longest word, or of its longest line."""
    texts = [str(column.header), *(str(cell) for cell in column.cells)]
    return max(cell_len(part) for text in texts for part in (text.splitlines() if lines else text.split()) or [""])


def _without(table: Table, name: str) -> Table:
    """Return a copy of a table that lacks a column."""
    kept = [column for column in table.columns[1:] if str(column.header) != name]
    kept.insert(0, table.columns[0])
    copy = Table(
        title=table.title,
        title_justify=table.title_justify,
        caption=table.caption,
        caption_justify=table.caption_justify,
        box=table.box,
        show_edge=table.show_edge,
        pad_edge=table.pad_edge,
    )
    for column in kept:
        copy.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
    for cells in zip(*(column.cells for column in kept), strict=True):
        copy.add_row(*cells)
    return copy
