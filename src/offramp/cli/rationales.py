"""`offramp rationales`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from offramp.cli._options import BatchSize, Sets, key_values
from offramp.errors import OfframpError


def command(
    data: Annotated[str, typer.Argument(help="a folder with train and dev rows: tokens, rationale (0/1 each), label")],
    *,
    out: Annotated[str, typer.Option(help="where runs, tables and the picture go")],
    model: Annotated[str, typer.Option(help="a model folder, a hub name, or `minilm` for the carried one")],
    part: Annotated[str, typer.Option(help="agreement, selection or both")] = "both",
    epochs: Annotated[int, typer.Option(min=1, help="epochs of each stage of each run")] = 5,
    batch_size: BatchSize = 16,
    lr: Annotated[float, typer.Option(help="learning rate of the pretrained part")] = 5e-5,
    max_length: Annotated[int, typer.Option(help="longest row in tokens")] = 512,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first N rows of each split")] = None,
    scale: Annotated[float, typer.Option(help="of AdapLeR's thresholds while its predictors are watched")] = 1.0,
    seed: Annotated[int, typer.Option(help="decides everything random")] = 42,
    set_: Sets = None,
) -> None:
    """Compare what models look at with what people marked, and train on marked words only. Run it again to go on."""
    from offramp.cli.printing import console
    from offramp.cli.printing.progress import TrainingDisplay
    from offramp.commands import train as jobs
    from offramp.evaluation import rationale_runs
    from offramp.evaluation.demo_data import carried_model
    from offramp.training.schedule import Schedule
    from offramp.utils.command_line import command_line

    if part not in ("agreement", "selection", "both"):
        raise OfframpError("a part of the study", f"--part {part}", "use agreement, selection or both")
    study = rationale_runs.Study(
        data=data,
        out=out,
        model=carried_model() if model == "minilm" else model,
        max_length=max_length,
        limit=limit,
        scale=scale,
        options=dict(key_values(set_, "--set")),
        schedule=Schedule(epochs, batch_size, lr, seed=seed),
        command=command_line(),
    )

    def train(job: jobs.TrainRequest) -> Any:
        console.print_note(f"training {job.out}")
        with TrainingDisplay(epochs) as shown:
            return jobs.run_training(job, False, shown.report)

    if part != "selection":
        console.out.print(rationale_runs.agreement_table(rationale_runs.compare(study, train)))
    if part != "agreement":
        console.out.print(rationale_runs.selection_table(rationale_runs.select(study, train)))
    console.out.print(f"written to {out}", markup=False, soft_wrap=True)
