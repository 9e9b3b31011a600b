"""`offramp predict`."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Annotated

import typer

from offramp.cli._options import (
    BatchSize,
    Budget,
    Cache,
    Columns,
    Engine,
    Latency,
    MaxDisagreement,
    MaxLoss,
    Precision,
    Risk,
    Run,
    Threads,
    check_run,
    comma_list,
)
from offramp.data.readers import check_source
from offramp.errors import OfframpError
from offramp.utils.command_line import key_values

if TYPE_CHECKING:
    from offramp.commands.predict import PredictSummary
    from offramp.distributed import BatchSummary


def command(
    run: Run,
    *,
    input: Annotated[str, typer.Option(help="rows to predict, or - for standard input; with --cluster also DIR/*.csv")],
    output: Annotated[
        str | None,
        typer.Option(
            help="a .jsonl (or .txt) file, .gz compresses it; standard output if left out; a folder with --cluster"
        ),
    ] = None,
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
    column: Columns = None,
    format: Annotated[
        str | None, typer.Option(help="format of the input where its ending does not tell it: jsonl, csv, tsv, txt")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="columns of the input to write beside the prediction: id,text or all")
    ] = None,
    long: Annotated[
        str, typer.Option(help="texts that are longer than the model: truncate, or window (read in overlapping parts)")
    ] = "truncate",
    window_pool: Annotated[
        str | None, typer.Option(help="with --long window: mean or max of the parts' scores; mean if left out")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="stop at the first bad row instead of going on")] = False,
    cluster: Annotated[
        str | None, typer.Option(help="answer many files on Ray: auto, an address, or local for this machine")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="actors on the cluster; as many as fit if left out")
    ] = None,
    output_format: Annotated[
        str | None, typer.Option(help="on the cluster: parquet, jsonl or csv; as the input if left out")
    ] = None,
) -> None:
    """Write a prediction for every row, in order, one JSON object a line; a bad row gets its error.

    The exit code is 1 if no row could be answered.

    With --cluster the rows of many files get columns with their predictions; the same command continues after a kill.
    """
    check_run(run)
    if cluster is None:
        check_source(input)
    if window_pool is not None and long != "window":
        given = f"--window-pool {window_pool} with --long {long}"
        raise OfframpError("options that go together", given, "add --long window, or leave it out")
    from offramp.cli.printing.console import print_note
    from offramp.cli.printing.progress import predictions_on_screen, row_bar
    from offramp.commands.predict import check_cluster_options, predict, predict_on_cluster

    check_cluster_options(
        cluster,
        output,
        only_there={"replicas": replicas, "output-format": output_format},
        never_there={"format": format, "keep": keep, "strict": strict or None},
    )
    if cluster is not None and output is not None:
        with row_bar("answering"):
            batch = predict_on_cluster(
                run,
                input,
                output,
                cluster,
                budget=budget,
                max_loss=max_loss,
                risk=risk,
                latency=latency,
                max_disagreement=max_disagreement,
                replicas=replicas,
                threads=threads or 1,
                batch_size=batch_size,
                engine=engine,
                precision=precision,
                columns=key_values(column, "--column"),
                long=long,
                window_pool=window_pool or "mean",
                format=output_format,
            )
        earlier = f", {batch.earlier_rows} of them before" if batch.earlier_rows else ""
        cost = f"with {batch.mac_share:.3f} of the full compute{_truncated(batch)}"
        print_note(f"rows answered: {batch.rows}{earlier}, {cost}")
        print_note(f"{batch.errors} rows with an error; {batch.replicas} actors, {batch.rows_per_second:.1f} rows/s")
        return
    with row_bar("answering", quiet=predictions_on_screen(output)):
        done = predict(
            run,
            input,
            output,
            budget=budget,
            max_loss=max_loss,
            risk=risk,
            latency=latency,
            max_disagreement=max_disagreement,
            batch_size=batch_size,
            engine=engine,
            precision=precision,  # type: ignore[arg-type]  # checked there
            threads=threads,
            columns=key_values(column, "--column"),
            format=format,
            keep=comma_list(keep or ""),
            strict=strict,
            long=long,  # type: ignore[arg-type]  # checked there
            window_pool=window_pool or "mean",  # type: ignore[arg-type]  # checked there
            on_loaded=gc.freeze,  # a collection that passes over all loaded libraries would slow a long stream down
        )
    if done.bad_rows:
        print_note(f"bad rows, answered with an error: {done.bad_rows}; the first: {done.first_error}")
    print_note(f"rows answered: {done.rows}, with {done.mac_share:.3f} of the full compute{_truncated(done)}")
    if done.bad_rows and not done.rows:
        raise typer.Exit(1)


def _truncated(done: PredictSummary | BatchSummary) -> str:
    """Return how many inputs were truncated, as the end of a sentence; "" if none was."""
    return f", {done.truncated} truncated to {done.max_length} tokens" if done.truncated else ""
