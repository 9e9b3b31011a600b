"""`offramp attach`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Cache, Columns, check_model
from offramp.data.readers import check_source
from offramp.utils.command_line import key_values


def command(
    model: Annotated[str, typer.Argument(help="a fine-tuned model: a folder, a hub name, or an Offramp run")],
    *,
    text: Annotated[str, typer.Option(help="unlabelled texts like those the model will see: .txt, .jsonl, .csv …")],
    out: Annotated[str, typer.Option(help="where to write the run folder")],
    risk: Annotated[
        float | None, typer.Option(help="prove a setting that disagrees at most this often; it becomes the default")
    ] = None,
    confidence: Annotated[float, typer.Option(help="confidence of that proof")] = 0.95,
    budget: Annotated[
        float | None, typer.Option(help="make the best point within this share of compute default")
    ] = None,
    latency: Annotated[str | None, typer.Option(help="make the best point within this time default, e.g. 5ms")] = None,
    labels: Annotated[str | None, typer.Option(help="labelled rows, to report the metric too")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="use only the first N texts")] = None,
    exits: Annotated[
        str, typer.Option(help="layers that get an exit, e.g. 0,2,4; auto: by expected time here")
    ] = "auto",
    pair: Annotated[str | None, typer.Option(help="the two text columns of a model of pairs: text_a,text_b")] = None,
    revision: Annotated[str | None, typer.Option(help="of a model on the hub")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="the longest row in tokens")] = None,
    seed: Annotated[int, typer.Option(help="of the split and of training")] = 0,
    held_out: Annotated[
        str | None, typer.Option(help="texts for the operating points instead of a fifth of --text, new to the model")
    ] = None,
    column: Columns = None,
    cache: Cache = None,  # used by its callback
    force: Annotated[bool, typer.Option("--force", help="replace the run that is in --out")] = False,
) -> None:
    """Give a fine-tuned model exits that learn its own answers, in one pass over texts without labels."""
    check_model(model)
    check_source(text)
    for source in (labels, held_out):
        if source is not None:
            check_source(source)
    from offramp.cli.printing.console import print_note
    from offramp.cli.printing.progress import row_bar
    from offramp.cli.printing.tables import print_attached
    from offramp.commands.attach import attach

    def note(**what: object) -> None:
        if "texts" in what:
            print_note(f"{what['task']}: {what['texts']} texts train the exits, {what['held_out']} are held out")

    with row_bar("attaching"):
        run = attach(
            model,
            text,
            out,
            risk=risk,
            confidence=confidence,
            budget=budget,
            latency=latency,
            labels=labels,
            rows=rows,
            exits=exits,
            pair=tuple(pair.split(",")) if pair else (),
            revision=revision,
            max_length=max_length,
            columns=key_values(column, "--column"),
            seed=seed,
            held_out=held_out,
            force=force,
            listener=note,
        )
    print_attached(run)
