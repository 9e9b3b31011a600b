"""`offramp compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import BatchSize, command_line


def command(
    *,
    data: Annotated[str, typer.Option(help="a folder of data sets: NAME/train.jsonl, NAME/test.jsonl")],
    out: Annotated[str, typer.Option(help="where cells, runs and the report are written")],
    methods: Annotated[str, typer.Option(help="all, or names like branchynet,truncate:k=2")] = "all",
    models: Annotated[str, typer.Option(help="model folders or hub names; minilm is the carried one")] = "minilm",
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds, from 42 on")] = 1,
    rows: Annotated[int | None, typer.Option(min=1, help="only the first N training rows")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="epochs of each stage, the same for all")] = 3,
    batch_size: BatchSize = 32,
    lr: Annotated[float, typer.Option(help="learning rate of the pretrained part")] = 1e-4,
    time_limit: Annotated[str | None, typer.Option(help="start no cell that would end later: 90m, 2h")] = None,
    collect: Annotated[str, typer.Option(help="earlier results: cells found there do not run again")] = "results",
    bench: Annotated[int, typer.Option(min=0, help="at the end time every run on the first N rows; 0: none")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="go on with a comparison")] = False,
) -> None:
    """Train, calibrate and evaluate every method on every data set, fairly; then write the report."""
    from pathlib import Path

    from offramp.cli import comparison_progress as progress
    from offramp.cli import console
    from offramp.commands import compare as study
    from offramp.evaluation.clocking import clock
    from offramp.evaluation.demo_data import carried_model
    from offramp.evaluation.plan import Plan, chosen_methods, seconds, sets_of

    limit = seconds(time_limit) if time_limit else None
    study.check_free(out, resume)
    named = [carried_model() if name == "minilm" else name for name in models.split(",")]
    training = {"epochs": epochs, "batch_size": batch_size, "lr": lr}
    plan = Plan(sets_of(data, rows), named, chosen_methods(methods), range(42, 42 + seeds), training)
    with progress.Comparison(out) as shown:
        made = study.compare(plan, study.Place(Path(out), collect, limit, command_line()), shown.tell)
    if bench:
        made.broken.update(clock(made.cells, Path(out), bench, command_line(), console.say_plainly))
    progress.conclude(made, out, console.out)
