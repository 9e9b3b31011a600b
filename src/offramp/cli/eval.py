"""`offramp eval`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from offramp.cli._options import (
    BatchSize,
    Budget,
    Cache,
    Columns,
    Engine,
    Json,
    Latency,
    Limit,
    MaxDisagreement,
    MaxLoss,
    Precision,
    Risk,
    Run,
    Sets,
    Threads,
    check_run,
)
from offramp.data.readers import check_source
from offramp.errors import OfframpError
from offramp.utils.command_line import command_line, key_values
from offramp.utils.files import STANDARD_OUTPUT


def command(
    run: Run,
    *,
    data: Annotated[str, typer.Option(help="labelled rows")],
    set_: Sets = None,
    budget: Budget = None,
    max_loss: MaxLoss = None,
    risk: Risk = None,
    latency: Latency = None,
    max_disagreement: MaxDisagreement = None,
    batch_size: BatchSize = 32,
    engine: Engine = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    cache: Cache = None,  # used by its callback
    limit: Limit = None,
    column: Columns = None,
    curve: Annotated[bool, typer.Option("--curve", help="all operating points instead of one setting")] = False,
    json: Json = None,
) -> None:
    """Score a run on labelled rows: metrics, share of the full compute, the layers at which rows left."""
    check_run(run)
    check_source(data)
    from offramp.cli.printing.progress import row_bar
    from offramp.cli.printing.tables import print_cell, print_curve
    from offramp.commands.evaluate import evaluate, evaluate_points

    shared: dict[str, Any] = {
        "batch_size": batch_size,
        "engine": engine,
        "precision": precision,
        "threads": threads,
        "limit": limit,
        "columns": key_values(column, "--column"),
        "json": json,
        "command": command_line(),
    }
    if curve:
        if any(value is not None for value in (set_, budget, max_loss, risk, latency, max_disagreement)):
            raise OfframpError("a curve", "--curve and one setting", "give --curve alone: it has all operating points")
        with row_bar("evaluating"):
            cells = evaluate_points(run, data, **shared)
        if json != STANDARD_OUTPUT:
            print_curve(cells)
        return
    settings = key_values(set_, "--set")
    with row_bar("evaluating"):
        cell = evaluate(
            run,
            data,
            budget=budget,
            max_loss=max_loss,
            risk=risk,
            latency=latency,
            max_disagreement=max_disagreement,
            settings=settings,
            **shared,
        )
    if json != STANDARD_OUTPUT:  # a table behind it would spoil the JSON
        print_cell(cell)
