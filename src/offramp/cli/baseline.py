"""`offramp baseline`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Columns, Json, command_line, pairs


def command(
    *,
    train: Annotated[str, typer.Option(help="training rows")],
    data: Annotated[str, typer.Option(help="labelled rows to score")],
    limit: Annotated[int | None, typer.Option(min=1, help="only the first N training rows")] = None,
    column: Columns = None,
    json: Json = None,
) -> None:
    """What TF-IDF and logistic regression reach on the same rows, in milliseconds and without a Transformer."""
    from offramp.cli import console
    from offramp.data.readers import read
    from offramp.evaluation.baselines import tfidf

    names = pairs(column, "--column")
    rows = read(train, columns=names, limit=limit)
    console.show_cell(tfidf(rows, read(data, columns=names), (train, data), command_line()), json)
