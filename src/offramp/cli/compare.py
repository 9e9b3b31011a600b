"""`offramp compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import TRAINING_BATCH, check_data_folder, check_model, comma_list
from offramp.utils.command_line import command_line


def command(
    *,
    data: Annotated[str, typer.Option(help="a folder of data sets: NAME/train.jsonl, NAME/test.jsonl")],
    out: Annotated[str, typer.Option(help="where cells, runs and the report are written")],
    methods: Annotated[str, typer.Option(help="all, or names like branchynet,truncate:k=2")] = "all",
    models: Annotated[str, typer.Option(help="model folders or hub names, or `minilm`")] = "minilm",
    seeds: Annotated[int, typer.Option(min=1, help="number of seeds, from 42 on")] = 1,
    rows: Annotated[int | None, typer.Option(min=1, help="only the first N training rows")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="epochs of each stage, the same for all methods")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help=TRAINING_BATCH)] = 32,
    lr: Annotated[float, typer.Option(help="learning rate of the pretrained part")] = 1e-4,
    time_limit: Annotated[str | None, typer.Option(help="start no cell that would end later: 90m, 2h")] = None,
    collect: Annotated[str, typer.Option(help="earlier results: cells found there do not run again")] = "results",
    bench: Annotated[
        int, typer.Option(min=0, help="at the end measure the speed of every run on N rows; 0: do not")
    ] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="continue the comparison in --out")] = False,
    cluster: Annotated[
        str | None, typer.Option(help="run cells as tasks on Ray: auto, an address, or local for this machine")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, show_default="1", help="processors of a cell on the cluster")
    ] = None,
) -> None:
    """Train, calibrate and evaluate every method on every data set under the same rules; then write the report.

    If a cell broke, the others go on, and the exit code is 1.
    """
    check_data_folder(data)
    for model in comma_list(models):
        check_model(model)
    from offramp.cli.printing.console import print_note
    from offramp.cli.printing.progress import ComparisonDisplay
    from offramp.cli.printing.tables import cells_table, print_comparison
    from offramp.commands.compare import compare

    with ComparisonDisplay(out, cells_table) as display:
        comparison = compare(
            data,
            out,
            methods=methods,
            models=models,
            seeds=seeds,
            rows=rows,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            time_limit=time_limit,
            collect=collect,
            bench=bench,
            resume=resume,
            cluster=cluster,
            threads=threads,
            listener=display.update,
            note=print_note,
            command=command_line(),
        )
    print_comparison(comparison, out)
    if comparison.progress.broken:
        raise typer.Exit(1)
