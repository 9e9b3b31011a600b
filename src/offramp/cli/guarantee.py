"""`offramp guarantee`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Columns, Json, Limit, Run, key_values


def command(
    run: Run,
    *,
    data: Annotated[str, typer.Option(help="labelled rows the model has never seen, many of them")],
    risk: Annotated[float, typer.Option(help="how much may depart from the full model")] = 0.01,
    confidence: Annotated[float, typer.Option(help="with which that is proven each time")] = 0.95,
    rows: Annotated[int, typer.Option(min=2, help="rows drawn for each proof; the others test it")] = 1500,
    trials: Annotated[int, typer.Option(min=1, help="how many proofs")] = 100,
    limit: Limit = None,
    column: Columns = None,
    json: Json = None,
) -> None:
    """Check `calibrate --risk` on real rows: prove again and again, count how often the other rows break it."""
    from pathlib import Path

    from offramp.cli.printing.progress import row_bar
    from offramp.data.readers import read
    from offramp.evaluation import result_cells as study
    from offramp.evaluation.guarantee import Draws, broken
    from offramp.inference.predictor import Predictor
    from offramp.inference.run_folder import load_run, read_recipe
    from offramp.utils.command_line import command_line
    from offramp.utils.files import write_json

    given = read(data, columns=key_values(column, "--column"), limit=limit)
    origin = study.Origin(*study.place(data), command_line(), read_recipe(run))
    with row_bar("proving"):
        found = broken(Predictor(load_run(run)), given, Draws(risk, confidence, rows, trials), origin)
    if json:
        write_json(Path(json), found)
    shown = f"{found['broken']:.3f} of {trials} proofs were broken on the other rows ({found['allowed']:g} may be)"
    mean = {name: found[name]["mean"] for name in ("departure", "share_of_full")}
    typer.echo(f"{shown}; {mean['departure']:.4f} departs at {mean['share_of_full']:.3f} of the compute, on average")
