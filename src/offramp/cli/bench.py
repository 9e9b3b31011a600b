"""`offramp bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Cache, Columns, Run, check_run, comma_list, comma_numbers
from offramp.data.readers import check_source
from offramp.errors import OfframpError
from offramp.utils.command_line import command_line, key_values
from offramp.utils.files import STANDARD_OUTPUT


def command(
    run: Run,
    *,
    data: Annotated[str, typer.Option(help="labelled rows")],
    batch_sizes: Annotated[str, typer.Option(help="batch sizes")] = "1,8,32",
    budgets: Annotated[
        str,
        typer.Option(
            help="budgets of the run: 0.5, default, max-loss=0.01, max-disagreement=0.01, risk=0.01, latency=5ms"
        ),
    ] = "1.0,0.5,0.3",
    engines: Annotated[str, typer.Option(help="engines of Offramp: auto, native, openvino, torch")] = "auto",
    against: Annotated[
        str,
        typer.Option(
            help="other runtimes: hf, hf-compile, onnxruntime, openvino, ctranslate2; or an engine of Offramp"
        ),
    ] = "hf,hf-compile,onnxruntime,openvino,ctranslate2",
    precisions: Annotated[str, typer.Option(help="precisions, wherever a runtime has them")] = "fp32,bf16,int8",
    orders: Annotated[str, typer.Option(help="orders of rows in batches: given, sorted (by length)")] = "given,sorted",
    rounds: Annotated[int, typer.Option(min=1, help="interleaved rounds after the warm-up")] = 5,
    threads: Annotated[
        int | None, typer.Option(min=1, help="processor threads of every runtime; torch's default if left out")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="use only the first N rows")] = None,
    memory: Annotated[bool, typer.Option(help="measure memory too, each runtime in a fresh process")] = True,
    peer_samples: Annotated[
        str | None,
        typer.Option(help="rows on which runtimes with static int8 measure activations; those of --data if left out"),
    ] = None,
    png: Annotated[str | None, typer.Option(help="draw score against speed to this file")] = None,
    json: Annotated[
        str | None, typer.Option("--json", help="write the measurements here; an unfinished file is continued")
    ] = None,
    column: Columns = None,
    cache: Cache = None,  # used by its callback
) -> None:
    """Measure rows a second, latency, memory and score of a run at several budgets, and of other runtimes."""
    check_run(run)
    check_source(data)
    from offramp.cli.printing.bench_tables import print_bench
    from offramp.cli.printing.progress import BenchDisplay
    from offramp.commands.bench import bench

    sizes, names = comma_numbers(batch_sizes, "--batch-sizes"), key_values(column, "--column")
    with BenchDisplay() as display:
        file = bench(
            run,
            data,
            batch_sizes=sizes,
            budgets=comma_list(budgets),
            engines=comma_list(engines),
            against=comma_list(against),
            precisions=comma_list(precisions),
            orders=comma_list(orders),
            rounds=rounds,
            threads=threads,
            rows=rows,
            memory=memory,
            peer_samples=peer_samples,
            columns=names,
            json=json,
            png=png,
            watcher=display,
            command=command_line(),
        )
    if json != STANDARD_OUTPUT:  # tables behind it would spoil the JSON
        print_bench(file)
    if not file["rows"]:
        given = "no engine or runtime could be measured; the reasons are above"
        raise OfframpError("something to show", given, "install an engine")
