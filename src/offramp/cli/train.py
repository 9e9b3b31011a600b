"""`offramp train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from offramp.cli._options import BatchSize, Columns, Sets, key_values

PACKAGE = Path(__file__).parents[1]  # listed, not imported: help must not wait for torch
_METHODS = sorted(path.stem for path in (PACKAGE / "methods").glob("[a-z]*.py"))
METHODS = f"{', '.join(_METHODS)}; or two in one: length_adaptive+branchynet"
_RECIPES = sorted(path.parent.name for path in (PACKAGE / "commands" / "recipes").glob("*/*.yaml"))
RECIPES = f"published settings, METHOD/DATA, e.g. adapler/agnews; of {', '.join(dict.fromkeys(_RECIPES))}; flags win"


def command(
    ctx: typer.Context,
    *,
    model: Annotated[str, typer.Option(help="a folder, a hub name, `minilm`; a .json of a translation model to make")],
    train: Annotated[str, typer.Option(help="rows: .jsonl .csv .tsv .parquet (.gz), SQuAD .json, or a datasets name")],
    out: Annotated[str, typer.Option(help="where the run is written")],
    task: Annotated[str, typer.Option(help="what is learned: tagging, translation …")] = "classification",
    method: Annotated[str, typer.Option(help=METHODS)] = "full",
    dev: Annotated[str | None, typer.Option(help="rows to choose and calibrate on")] = None,
    dev_split: Annotated[float, typer.Option(help="share of the training rows held out when there is no --dev")] = 0.1,
    init: Annotated[str | None, typer.Option(help="start from the fine-tuned weights of this run")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="epochs of each stage")] = 3,
    batch_size: BatchSize = 32,
    lr: Annotated[float, typer.Option(help="learning rate of the pretrained part")] = 5e-5,
    max_length: Annotated[int | None, typer.Option(help="longest row in tokens")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first N training rows; --dev is whole")] = None,
    seed: Annotated[int, typer.Option(help="decides everything random")] = 42,
    precision: Annotated[str, typer.Option(help="auto, bf16 or fp32")] = "auto",
    save_seconds: Annotated[float, typer.Option(help="seconds between checkpoints")] = 120.0,
    recipe: Annotated[str | None, typer.Option(help=RECIPES)] = None,
    column: Columns = None,
    set_: Sets = None,
    force: Annotated[bool, typer.Option("--force", help="replace what is in --out")] = False,
) -> None:
    """Fine-tune a model with off-ramps, calibrate it and write a model folder. Interrupted? Run the same again."""
    from offramp.cli.printing.progress import TrainingDisplay
    from offramp.cli.printing.tables import print_trained
    from offramp.commands import recipes
    from offramp.commands import train as jobs
    from offramp.training.schedule import Schedule

    flags: dict[str, Any] = {
        "method": method, "task": task, "epochs": epochs, "batch_size": batch_size, "lr": lr, "max_length": max_length,
    }  # fmt: skip
    if recipe is None:
        plan = recipes.Recipe(**flags, options=key_values(set_, "--set"))
    else:
        typed = {name: value for name, value in flags.items() if _typed(ctx, name)}
        plan = recipes.load(recipe).told(typed, key_values(set_, "--set"))
    request = jobs.TrainRequest(
        model=jobs.model_source(model),
        train=train,
        out=out,
        task=plan.task,
        method=plan.method,
        dev=dev,
        dev_split=dev_split,
        init=init,
        max_length=plan.max_length,
        limit=limit,
        columns=key_values(column, "--column"),
        options=plan.options,
        schedule=Schedule(
            plan.epochs,
            plan.batch_size,
            plan.lr,
            plan.warmup,
            plan.weight_decay,
            seed=seed,
            precision=precision,
            save_seconds=save_seconds,
        ),
    )
    with TrainingDisplay(plan.epochs) as progress:
        trained = jobs.run_training(request, force, progress.report)
    print_trained(trained, out)


def _typed(ctx: typer.Context, name: str) -> bool:
    """Whether a flag was given, rather than left at its default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
