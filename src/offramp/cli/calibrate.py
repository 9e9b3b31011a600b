"""`offramp calibrate`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Budget, Columns, Limit, MaxLoss, Run, pairs


def command(
    run: Run,
    *,
    data: Annotated[str, typer.Option(help="labelled rows the model was not trained on")],
    budget: Budget = None,
    max_loss: MaxLoss = None,
    risk: Annotated[float | None, typer.Option(help="prove that at most so much departs from the full model")] = None,
    confidence: Annotated[float, typer.Option(help="with which the risk must hold")] = 0.95,
    limit: Limit = None,
    column: Columns = None,
) -> None:
    """Find settings for every budget on held-out rows; with --risk, settings that come with a guarantee."""
    from offramp.budget.recalibrate import recalibrate
    from offramp.study import console
    from offramp.study.bars import bar
    from offramp.text.read import read

    console.check_wish(budget, max_loss)
    rows = read(data, columns=pairs(column, "--column"), limit=limit)
    with bar("calibrating"):
        points = recalibrate(run, rows, data, risk, confidence)
    console.show_points(points, budget, max_loss)
