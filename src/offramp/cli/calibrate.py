"""`offramp calibrate`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Budget, Columns, Engine, Limit, MaxLoss, Precision, Run, Threads, key_values
from offramp.errors import OfframpError


def command(
    run: Run,
    *,
    data: Annotated[str, typer.Option(help="labelled rows the model was not trained on")],
    budget: Budget = None,
    max_loss: MaxLoss = None,
    risk: Annotated[float | None, typer.Option(help="prove that at most so much departs from the full model")] = None,
    confidence: Annotated[float, typer.Option(help="with which the risk must hold")] = 0.95,
    latency: Annotated[str | None, typer.Option(help="find settings that answer single rows within this: 5ms")] = None,
    percentile: Annotated[float, typer.Option(help="of rows that must be answered within --latency")] = 95.0,
    engine: Engine = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    limit: Limit = None,
    column: Columns = None,
) -> None:
    """Find settings for every budget on held-out rows; with --risk or --latency, settings that keep a promise."""
    from offramp.calibration.latency import LatencyRequest
    from offramp.cli.printing.progress import row_bar
    from offramp.cli.printing.tables import print_points
    from offramp.commands.calibrate import check_point_request, recalibrate
    from offramp.data.readers import read_rows
    from offramp.inference.budget import parse_latency

    check_point_request(budget, max_loss)
    time = None if latency is None else parse_latency(latency)
    if time is None and (engine, precision, threads) != ("auto", "fp32", None):
        given = f"--engine {engine} --precision {precision}" + ("" if threads is None else f" --threads {threads}")
        raise OfframpError("an engine to be timed", f"{given} without --latency", "add --latency 5ms")
    wish = None if time is None else LatencyRequest(time, percentile, engine, precision, threads)  # type: ignore[arg-type]  # checked there
    rows = read_rows(data, columns=key_values(column, "--column"), limit=limit)
    with row_bar("calibrating"):
        points = recalibrate(run, rows, data, risk, confidence, wish)
    print_points(points, budget, max_loss)
