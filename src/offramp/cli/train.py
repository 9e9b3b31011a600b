"""`offramp train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offramp.cli._options import TRAINING_BATCH, Columns, check_run
from offramp.data.readers import check_source
from offramp.utils.command_line import key_values

PACKAGE = Path(__file__).parents[1]  # its folders are listed, not imported: help must not wait for torch
_METHODS = sorted(
    path.stem
    for path in (PACKAGE / "methods").glob("[a-z]*")
    if path.suffix == ".py" or (path / "__init__.py").is_file()
)
METHODS = f"auto (by task and rows), {', '.join(_METHODS)}; or two in one: length_adaptive+branchynet"
_RECIPES = sorted({path.parent.name for path in (PACKAGE / "commands" / "recipes").glob("*/*.yaml")})
RECIPES = f"published settings, METHOD/DATA, e.g. adapler/agnews; of {', '.join(_RECIPES)}; other options win over it"


def command(
    *,
    train: Annotated[str, typer.Option(help="rows: .jsonl .csv .tsv .parquet (.gz), SQuAD .json, or a datasets name")],
    out: Annotated[str, typer.Option(help="where the run is written")],
    model: Annotated[
        str | None,
        typer.Option(help="a folder, a hub name, `minilm`; or a .json of a translation model; not needed with --init"),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(show_default="by the columns", help="classification, regression, tagging, question_answering …"),
    ] = None,
    method: Annotated[str | None, typer.Option(show_default="auto", help=METHODS)] = None,
    metric: Annotated[
        str | None,
        typer.Option(show_default="the task's", help="choose by it; of classification: accuracy, f1, matthews"),
    ] = None,
    dev: Annotated[str | None, typer.Option(help="rows to choose epochs and operating points on")] = None,
    dev_split: Annotated[float, typer.Option(help="share of the training rows held out when there is no --dev")] = 0.1,
    init: Annotated[str | None, typer.Option(help="start from the fine-tuned weights of this run")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, show_default="3", help="epochs of each stage")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, show_default="32", help=TRAINING_BATCH),
    ] = None,
    lr: Annotated[float | None, typer.Option(show_default="5e-05", help="learning rate of the pretrained part")] = None,
    later_lr: Annotated[
        float | None,
        typer.Option(
            show_default="0.3 of --lr, all of it in some methods and with --recipe",
            help="learning rate in stages after fine-tuning",
        ),
    ] = None,
    embedding_lr: Annotated[
        float | None,
        typer.Option(show_default="--lr; 0.002 from scratch", help="learning rate of the embedding tables"),
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="longest row in tokens")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first N training rows; all of --dev")] = None,
    seed: Annotated[int, typer.Option(help="seed of all random numbers")] = 42,
    precision: Annotated[str, typer.Option(help="precision of training: auto, bf16 or fp32")] = "auto",
    save_seconds: Annotated[float, typer.Option(help="seconds between checkpoints")] = 120.0,
    snapshots: Annotated[
        int, typer.Option(min=0, help="keep the weights so many times in each stage, in the run's folder snapshots")
    ] = 0,
    recipe: Annotated[str | None, typer.Option(help=RECIPES)] = None,
    column: Columns = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="an option of the method as key=value; may be repeated")
    ] = None,
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch", help="start from random weights; --model names a family: bert, alberta, modernbert …"
        ),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="from scratch: take the tokenizer of this model; learned from --train if left out"),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(show_default="8000", help="from scratch: size of the vocabulary that is learned")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="from scratch: an entry of config.json as key=value; may be repeated"),
    ] = None,
    loss_confidence: Annotated[
        float, typer.Option(help="confidence that a point chosen by --max-loss loses no more on new rows")
    ] = 0.9,
    attach: Annotated[
        str | None,
        typer.Option(help="fine-tune plainly (OUT-full), then attach exits with these texts, as `offramp attach` does"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace what is in --out")] = False,
) -> None:
    """Fine-tune a model with exits, calibrate it and write a run folder. The same command continues after a stop."""
    for source in (train, dev, attach):
        if source is not None:
            check_source(source)
    if init is not None:
        check_run(init)
    from offramp.cli.printing.progress import TrainingDisplay
    from offramp.cli.printing.tables import print_trained
    from offramp.commands import train as training

    with TrainingDisplay() as display:
        trained = training.train(
            model=model,
            train=train,
            out=out,
            task=task,
            method=method,
            metric=metric,
            dev=dev,
            dev_split=dev_split,
            init=init,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            later_lr=later_lr,
            embedding_lr=embedding_lr,
            max_length=max_length,
            limit=limit,
            seed=seed,
            precision=precision,  # type: ignore[arg-type]  # checked there
            save_seconds=save_seconds,
            snapshots=snapshots,
            recipe=recipe,
            columns=key_values(column, "--column"),
            options=key_values(set_, "--set"),
            from_scratch=from_scratch,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            shape=key_values(shape, "--shape"),
            loss_confidence=loss_confidence,
            attach=attach,
            force=force,
            listener=display.report,
        )
    print_trained(trained, out)
