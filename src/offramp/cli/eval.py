"""`offramp eval`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import (
    BatchSize,
    Budget,
    Columns,
    Engine,
    Json,
    Latency,
    Limit,
    MaxLoss,
    Precision,
    Risk,
    Run,
    Sets,
    Threads,
    command_line,
    pairs,
    seconds,
)
from offramp.errors import OfframpError


def command(
    run: Run,
    *,
    data: Annotated[str, typer.Option(help="labelled rows")],
    set_: Sets = None,
    budget: Budget = None,
    max_loss: MaxLoss = None,
    risk: Risk = None,
    latency: Latency = None,
    batch_size: BatchSize = 32,
    engine: Engine = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    limit: Limit = None,
    column: Columns = None,
    curve: Annotated[bool, typer.Option("--curve", help="every operating point instead of one")] = False,
    json: Json = None,
) -> None:
    """Score a run on labelled rows: metrics, share of the full compute, where rows left."""
    from offramp.cli import console
    from offramp.cli.bars import bar
    from offramp.data.readers import read
    from offramp.evaluation import result_cells as study
    from offramp.evaluation.point_sweep import sweep
    from offramp.inference.predictor import Predictor
    from offramp.inference.run_folder import read_recipe

    predictor = Predictor.load(run, engine, precision, threads)  # type: ignore[arg-type]  # checked there
    settings = predictor.settings(budget, pairs(set_, "--set"), max_loss, risk, seconds(latency))
    if curve and (budget, set_, max_loss, risk, latency) != (None,) * 5:
        raise OfframpError("a curve", "--curve and one setting", "give --curve alone: it has all operating points")
    rows = read(data, columns=pairs(column, "--column"), limit=limit)
    predictor.task.check(rows, data)
    origin = study.Origin(*study.place(data), command_line(), read_recipe(run))
    if curve:
        with bar("evaluating"):
            cells = sweep(predictor, rows, origin, batch_size)
        console.show_curve(cells, json)
        return
    with bar("evaluating"):
        cell = study.evaluate(predictor, rows, settings, origin, batch_size)
    console.show_cell(cell, json)
