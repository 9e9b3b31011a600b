"""The two consoles: results go to standard output, everything else to standard error."""

from __future__ import annotations

from rich.console import Console

out = Console()
err = Console(stderr=True)


def print_line(text: str) -> None:
    """Print a line of the result as it is: brackets in names are no markup, and long lines are not wrapped."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def print_note(text: str) -> None:
    """Print a line about the work, not about its result, to standard error."""
    err.print(text, markup=False, highlight=False, soft_wrap=True)
