"""`offramp depths`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Columns, Limit, Run, Sets, key_values


def command(
    run: Run,
    text: Annotated[list[str] | None, typer.Argument(help="a sentence in quotes; two for a task on pairs")] = None,
    *,
    data: Annotated[str | None, typer.Option(help="count the words of these rows, not of the training rows")] = None,
    set_: Sets = None,
    limit: Limit = None,
    column: Columns = None,
    png: Annotated[str | None, typer.Option(help="draw the picture here")] = None,
    json: Annotated[str | None, typer.Option("--json", help="write the numbers here")] = None,
) -> None:
    """How deep each word goes where depths are planned (faster_dat): a sentence's words, and the histogram of all."""
    from pathlib import Path

    from offramp import methods
    from offramp.data.readers import read
    from offramp.evaluation import depths as study
    from offramp.inference.predictor import Predictor
    from offramp.utils.files import write_json

    predictor = Predictor.load(run)
    method = predictor.model.method
    settings = methods.configure(method.settings, key_values(set_, "--set"), method.name)
    rows = read(data, columns=key_values(column, "--column"), limit=limit) if data else []
    shown = study.depths(predictor, text or [], settings, rows)
    typer.echo("\n".join(study.lines(shown)))
    if png:
        study.draw(shown, f"word depths of {Path(run).name} ({method.name})", Path(png))
    if json:
        write_json(Path(json), {"run": Path(run).name, "settings": key_values(set_, "--set"), **shown.to_json()})
