"""`offramp explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offramp.cli._options import Budget, MaxLoss, Run, Sets, pairs


def command(
    run: Run,
    texts: Annotated[list[str], typer.Argument(help="the text; two of them for pairs or questions")],
    *,
    budget: Budget = None,
    max_loss: MaxLoss = None,
    set_: Sets = None,
    html: Annotated[str | None, typer.Option(help="write a page with a slider over all budgets here")] = None,
) -> None:
    """Show one input layer by layer: tokens that left, what each off-ramp said, where it stopped and why."""
    from offramp.cli import console
    from offramp.cli import explanation as story
    from offramp.evaluation.explanations import explain
    from offramp.evaluation.pages import explanation_page
    from offramp.inference.predictor import Predictor

    predictor = Predictor.load(run, "torch")
    made = explain(predictor, Path(run).name, texts, predictor.settings(budget, pairs(set_, "--set"), max_loss))
    story.show(made, console.out)
    if html:
        explanation_page(made, html)
        console.out.print(f"written to {html}", markup=False, soft_wrap=True)
