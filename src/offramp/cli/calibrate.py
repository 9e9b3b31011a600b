"""`offramp calibrate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from offramp.cli._options import Cache, Columns, Engine, Limit, Precision, Run, Threads, check_run
from offramp.data.readers import check_source
from offramp.utils.command_line import key_values


def command(
    run: Run,
    *,
    data: Annotated[
        str,
        typer.Option(
            help="rows the model was not trained on; without labels: points for --max-disagreement and --risk"
        ),
    ],
    budget: Annotated[float | None, typer.Option(help="print the point for this share of the full compute")] = None,
    max_loss: Annotated[float | None, typer.Option(help="print the cheapest point that loses at most this")] = None,
    risk: Annotated[
        float | None,
        typer.Option(help="find a setting and prove that at most this share disagrees with the full model"),
    ] = None,
    confidence: Annotated[float | None, typer.Option(show_default="0.95", help="confidence of that proof")] = None,
    latency: Annotated[
        str | None, typer.Option(help="find a setting that answers single rows within this time, e.g. 5ms")
    ] = None,
    percentile: Annotated[
        float | None,
        typer.Option(show_default="95", help="percentage of rows that must be answered within --latency"),
    ] = None,
    engine: Engine = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    cache: Cache = None,  # used by its callback
    loss_confidence: Annotated[
        float, typer.Option(help="confidence that a point chosen by --max-loss loses no more on new rows")
    ] = 0.9,
    force: Annotated[bool, typer.Option("--force", help="replace points that were found on far more rows")] = False,
    search: Annotated[
        bool, typer.Option("--search", help="search how many tokens each layer keeps (and, in a pair, when rows leave)")
    ] = False,
    iterations: Annotated[
        int | None, typer.Option(min=0, show_default="30", help="search: generations after the first population")
    ] = None,
    mutations: Annotated[
        int | None,
        typer.Option(min=0, show_default="30", help="search: new configurations by mutation in a generation"),
    ] = None,
    crossovers: Annotated[
        int | None,
        typer.Option(min=0, show_default="30", help="search: new configurations by averaging two in a generation"),
    ] = None,
    search_rows: Annotated[
        int | None,
        typer.Option(min=1, show_default="500", help="search: rows to search on, at most half; the others score"),
    ] = None,
    seed: Annotated[int | None, typer.Option(show_default="0", help="search: seed of all random numbers")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="search: continue an interrupted one")] = False,
    close_exit: Annotated[
        list[int] | None, typer.Option(min=0, help="a layer whose exit no setting may use, e.g. 0; may be repeated")
    ] = None,
    limit: Limit = None,
    column: Columns = None,
) -> None:
    """Find settings for every budget on held-out rows; with --risk or --latency also settings with a guarantee."""
    check_run(run)
    check_source(data)
    from offramp.calibration.length_search import SearchPlan
    from offramp.cli.printing.console import print_note
    from offramp.cli.printing.progress import SearchDisplay, row_bar
    from offramp.cli.printing.tables import print_points
    from offramp.commands.calibrate import calibrate
    from offramp.inference.budget import Budget

    shown = Budget.parse(budget, max_loss=max_loss)  # refused before any work
    given: dict[str, Any] = {
        "risk": risk,
        "confidence": confidence,
        "latency": latency,
        "percentile": percentile,
        "engine": engine,
        "precision": precision,
        "threads": threads,
        "search": search,
        "iterations": iterations,
        "mutations": mutations,
        "crossovers": crossovers,
        "search_rows": search_rows,
        "seed": seed,
        "resume": resume,
        "loss_confidence": loss_confidence,
        "force": force,
        "limit": limit,
        "columns": key_values(column, "--column"),
        "closed_exits": close_exit or (),
    }
    if search:
        with SearchDisplay(SearchPlan.iterations if iterations is None else iterations) as display:
            points = calibrate(run, data, **given, on_search=display.searching, on_scoring=display.scoring)
        tried, rows = points.data["tried"], points.data["search_rows"]
        print_note(f"{tried} configurations tried on {rows} rows; scored below on the others")
    else:
        with row_bar("calibrating"):
            points = calibrate(run, data, **given)
    print_points(points, shown)
