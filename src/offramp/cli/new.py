"""`offramp new`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Columns, Sets, key_values
from offramp.errors import OfframpError


def command(
    family: Annotated[str, typer.Argument(help="alberta, bert, modernbert …: a model type we run")],
    *,
    out: Annotated[str, typer.Option(help="where the model folder is written")],
    tokenizer: Annotated[str | None, typer.Option(help="whose tokenizer: a folder, a hub name, or `minilm`")] = None,
    text: Annotated[str | None, typer.Option(help="or learn one from the texts of these rows")] = None,
    vocabulary: Annotated[int, typer.Option(help="pieces of the tokenizer that is learned")] = 8000,
    column: Columns = None,
    set_: Sets = None,
    seed: Annotated[int, typer.Option(help="decides the weights")] = 42,
) -> None:
    """Make an untrained model; `offramp train --model OUT --task masked_lm` pretrains it."""
    from pathlib import Path

    from offramp.data.readers import read_rows
    from offramp.data.tokenizer_training import train_wordpiece_tokenizer
    from offramp.evaluation.demo_data import bundled_model
    from offramp.inference.new_model import create_model
    from offramp.inference.run_folder import load_tokenizer
    from offramp.tasks import get

    if (tokenizer is None) == (text is None):
        given = "both --tokenizer and --text" if text else "neither --tokenizer nor --text"
        raise OfframpError("a tokenizer for the new model", given, "give one of them, e.g. --tokenizer minilm")
    if text is not None:
        rows = read_rows(text, columns=key_values(column, "--column"))
        get("masked_lm").from_rows(rows, text)
        words = train_wordpiece_tokenizer((row["text"] for row in rows), vocabulary)
    else:
        words = load_tokenizer(bundled_model() if tokenizer == "minilm" else str(tokenizer))
    model = create_model(family, Path(out), words, key_values(set_, "--set"), seed)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    typer.echo(f"{family} of {size:.1f} million parameters, {len(words)} pieces, written to {out}")
    typer.echo(f"next: offramp train --model {out} --task masked_lm --train TEXTS --lr 5e-4 --out runs/pretrained")
