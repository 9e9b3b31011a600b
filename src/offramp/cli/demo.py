"""`offramp demo`."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    *,
    out: Annotated[str | None, typer.Option(help="the run folder (runs/demo, or runs/demo-quick with --quick)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer rows, under 90 seconds")] = False,
) -> None:
    """Fine-tune the carried MiniLM on movie-review sentences and show what a budget buys."""
    from offramp.commands.demo import demo as show

    show(out or ("runs/demo-quick" if quick else "runs/demo"), quick)
