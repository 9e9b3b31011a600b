"""`offramp baseline`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Columns, Json, key_values
from offramp.utils.command_line import command_line


def command(
    *,
    train: Annotated[str, typer.Option(help="training rows")],
    data: Annotated[str, typer.Option(help="labelled rows to score")],
    limit: Annotated[int | None, typer.Option(min=1, help="only the first N training rows")] = None,
    column: Columns = None,
    json: Json = None,
) -> None:
    """What TF-IDF and logistic regression reach on the same rows, in milliseconds and without a Transformer."""
    from pathlib import Path

    from offramp.cli.printing.tables import print_cell
    from offramp.data.readers import read
    from offramp.evaluation.baselines import tfidf
    from offramp.utils.files import write_json

    names = key_values(column, "--column")
    rows = read(train, columns=names, limit=limit)
    cell = tfidf(rows, read(data, columns=names), (train, data), command_line())
    if json:
        write_json(Path(json), cell)
    print_cell(cell)
