"""`offramp demo`."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    *,
    out: Annotated[str | None, typer.Option(help="the run folder (runs/demo, or runs/demo-quick with --quick)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer rows, under 90 seconds")] = False,
) -> None:
    """Fine-tune MiniLM with plain transformers, attach exits without labels, and show what they save."""
    from offramp.cli.printing.console import print_note
    from offramp.cli.printing.progress import TrainingDisplay
    from offramp.cli.printing.tables import print_demo
    from offramp.commands import demo

    run = out or demo.default_folder(quick)
    with TrainingDisplay() as display:
        found = demo.demo(run, quick=quick, listener=display.report, note=print_note)
    print_demo(found, run)
