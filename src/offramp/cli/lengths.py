"""`offramp lengths`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import (
    BatchSize,
    Budget,
    Columns,
    Engine,
    Json,
    Limit,
    MaxLoss,
    Precision,
    Run,
    Sets,
    Threads,
    key_values,
)


def command(
    run: Run,
    *,
    data: Annotated[str, typer.Option(help="rows of many lengths; labels are not needed")],
    set_: Sets = None,
    budget: Budget = None,
    max_loss: MaxLoss = None,
    batch_size: BatchSize = 32,
    rows: Annotated[int, typer.Option(min=1, help="rows timed of each length")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="times each is measured; the median counts")] = 5,
    engine: Engine = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    limit: Limit = None,
    column: Columns = None,
    json: Json = None,
) -> None:
    """Time a run on short and on long rows, beside its own loosest setting: speed against the length of a text."""
    from pathlib import Path

    from rich.console import Console

    from offramp.data.readers import read
    from offramp.evaluation.lengths import Effort, by_length, show
    from offramp.evaluation.result_cells import Origin, place
    from offramp.inference.predictor import Predictor
    from offramp.inference.run_folder import read_recipe
    from offramp.utils.command_line import command_line
    from offramp.utils.files import write_json

    predictor = Predictor.load(run, engine, precision, threads)  # type: ignore[arg-type]  # checked there
    settings = predictor.settings(budget, key_values(set_, "--set"), max_loss)
    given = read(data, columns=key_values(column, "--column"), limit=limit)
    origin = Origin(*place(data), command_line(), read_recipe(run))
    found = by_length(predictor, given, settings, origin, Effort(batch_size, rows, rounds))
    if json:
        write_json(Path(json), found)
    show(found, Console())
