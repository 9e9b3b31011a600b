"""`offramp report`."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    folder: Annotated[str, typer.Argument(help="a folder of result files, searched with all folders below")],
    *,
    out: Annotated[str | None, typer.Option(help="where the report is written (the same folder)")] = None,
    markdown: Annotated[str | None, typer.Option(help="write only the tables, as this Markdown file")] = None,
    speeds: Annotated[str | None, typer.Option(help="another folder whose bench and lengths files are shown")] = None,
) -> None:
    """Make one self-contained page, pictures and tables (Markdown, LaTeX) of all results in a folder."""
    from offramp.cli import console
    from offramp.commands.report import report

    found, written = report(folder, out, markdown, speeds)
    for name, problem in found.damaged:
        console.say_plainly(f"left out {name}: {problem}")
    if found.others:
        console.say_plainly(f"{len(found.others)} other JSON files passed over: {', '.join(found.others[:5])}")
    listed = ", ".join(str(path) for path in written)
    console.out.print(f"{len(found.entries)} models; written: {listed}", markup=False, soft_wrap=True)
