"""`offramp search`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Budget, Columns, Limit, MaxLoss, Run, key_values


def command(
    run: Run,
    *,
    data: Annotated[str, typer.Option(help="labelled rows the model was not trained on")],
    iterations: Annotated[int, typer.Option(min=0, help="generations after the first population")] = 30,
    mutations: Annotated[int, typer.Option(min=0, help="new configurations by mutation in each")] = 30,
    crossovers: Annotated[int, typer.Option(min=0, help="new configurations by averaging two in each")] = 30,
    rows: Annotated[int, typer.Option(min=1, help="rows to search on, at most half of them; the rest score")] = 500,
    resume: Annotated[bool, typer.Option("--resume", help="go on with a search that was interrupted")] = False,
    budget: Budget = None,
    max_loss: MaxLoss = None,
    seed: Annotated[int, typer.Option(help="decides everything random")] = 0,
    limit: Limit = None,
    column: Columns = None,
) -> None:
    """Find how many tokens each layer should keep (and, in a pair, when rows leave) for every budget."""
    from offramp.calibration.length_search import SearchPlan
    from offramp.cli.printing.console import print_note
    from offramp.cli.printing.progress import SearchDisplay
    from offramp.cli.printing.tables import print_points
    from offramp.commands.calibrate import check_point_request
    from offramp.commands.search import SearchRequest, search_run
    from offramp.data.readers import read_rows

    check_point_request(budget, max_loss)
    given = read_rows(data, columns=key_values(column, "--column"), limit=limit)
    plan = SearchPlan(iterations, mutations, crossovers, seed)
    with SearchDisplay(plan) as live:
        points = search_run(run, given, data, SearchRequest(plan, rows, resume), live.searching, live.scoring)
    about = points.data
    line = f"{about['tried']} configurations tried on {about['search_rows']} rows; scored below on the others"
    print_note(line)
    print_points(points, budget, max_loss)
