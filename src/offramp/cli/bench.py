"""`offramp bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Columns, Run, command_line, pairs


def command(
    run: Run,
    *,
    data: Annotated[str, typer.Option(help="labelled rows")],
    what: Annotated[str, typer.Option(help="speed, growth, startup or overhead")] = "speed",
    batch_sizes: Annotated[str, typer.Option(help="rows in a batch")] = "1,8,32",
    budgets: Annotated[str, typer.Option(help="of ours: shares, default, max-loss=0.01, risk=0.01, latency=5ms")] = (
        "1.0,0.5,0.3"
    ),
    engines: Annotated[str, typer.Option(help="of ours: auto, openvino, torch")] = "auto",
    against: Annotated[str, typer.Option(help="peers: hf, hf-compile, onnxruntime, openvino; or an engine of ours")] = (
        "hf,hf-compile,onnxruntime,openvino"
    ),
    precisions: Annotated[str, typer.Option(help="of everybody who has them")] = "fp32,bf16,int8",
    orders: Annotated[str, typer.Option(help="batches as rows are given, and sorted by length")] = "given,sorted",
    rounds: Annotated[int, typer.Option(min=1, help="interleaved rounds after the warm-up")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="for everybody; torch's own number if left out")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="use only the first N rows")] = None,
    memory: Annotated[bool, typer.Option(help="measure memory too, each in a fresh process")] = True,
    png: Annotated[str | None, typer.Option(help="draw score against speed here")] = None,
    json: Annotated[str | None, typer.Option("--json", help="write here; a file cut short is gone on with")] = None,
    column: Columns = None,
) -> None:
    """Measure this machine: rows a second, latency, memory and score of a run at several budgets, and of its peers."""
    import torch

    from offramp.commands import bench as measure
    from offramp.data.readers import read
    from offramp.evaluation.bench import Plan

    measure.check(what)
    plan = Plan(
        measure.numbers(batch_sizes, "--batch-sizes"),
        measure.words(budgets),
        measure.words(engines),
        measure.words(against),
        measure.words(precisions),
        measure.words(orders),
        rounds,
        threads or torch.get_num_threads(),
        memory,
    )
    given = read(data, columns=pairs(column, "--column"), limit=rows)
    request = measure.Request(run, given, data, plan, command_line())
    if what == "speed":
        measure.speed(request, json, png)
    else:
        measure.aside(request, what, json)
