"""`offramp predict`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import (
    BatchSize,
    Budget,
    Columns,
    Engine,
    Latency,
    MaxLoss,
    Precision,
    Risk,
    Run,
    Threads,
    pairs,
    seconds,
)


def command(
    run: Run,
    *,
    input: Annotated[str, typer.Option(help="rows to answer, or - for standard input")],
    output: Annotated[str | None, typer.Option(help="a .jsonl file; standard output if left out")] = None,
    budget: Budget = None,
    max_loss: MaxLoss = None,
    risk: Risk = None,
    latency: Latency = None,
    batch_size: BatchSize = 32,
    engine: Engine = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    column: Columns = None,
) -> None:
    """Answer rows in order, one JSON object a line."""
    from offramp.cli.bars import answers_on_screen, bar
    from offramp.commands.predict import answer_stream
    from offramp.inference.predictor import Predictor

    predictor = Predictor.load(run, engine, precision, threads)  # type: ignore[arg-type]  # checked there
    asked = predictor.settings(budget, None, max_loss, risk, seconds(latency))
    with bar("answering", quiet=answers_on_screen(output)):
        done = answer_stream(predictor, input, output, asked, batch_size, pairs(column, "--column"))
    cut = f", {done.cut} truncated to {predictor.model.max_length} tokens" if done.cut else ""
    typer.echo(f"rows answered: {done.rows}, with {done.share:.3f} of the full compute{cut}", err=True)
