"""`offramp report`."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    folder: Annotated[str, typer.Argument(help="a folder of result files, searched with all folders below")],
    *,
    out: Annotated[str | None, typer.Option(help="where the report is written; the same folder if left out")] = None,
    markdown: Annotated[str | None, typer.Option(help="write only the tables, as this Markdown file")] = None,
    speeds: Annotated[str | None, typer.Option(help="another folder whose bench and lengths files are shown")] = None,
) -> None:
    """Write one self-contained page, pictures and tables (Markdown, LaTeX) of all results in a folder."""
    from offramp.cli.printing.console import print_line, print_note
    from offramp.commands.report import report

    result = report(folder, out=out, markdown=markdown, speeds=speeds)
    for name, problem in result.found.damaged:
        print_note(f"left out {name}: {problem}")
    if result.found.others:
        print_note(f"{len(result.found.others)} other JSON files passed over: {', '.join(result.found.others[:5])}")
    print_line(f"{len(result.found.entries)} models; written: {', '.join(str(path) for path in result.written)}")
