"""`offramp explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import Budget, Cache, Latency, MaxDisagreement, MaxLoss, Risk, Run, Sets, check_run
from offramp.utils.command_line import key_values


def command(
    run: Run,
    texts: Annotated[list[str], typer.Argument(help="the text; two of them for pairs or questions")],
    *,
    budget: Budget = None,
    max_loss: MaxLoss = None,
    risk: Risk = None,
    latency: Latency = None,
    max_disagreement: MaxDisagreement = None,
    set_: Sets = None,
    html: Annotated[str | None, typer.Option(help="write a page with a slider over all budgets to this file")] = None,
    cache: Cache = None,  # used by its callback
) -> None:
    """Show one input layer by layer: tokens that left, the answer of each exit, where it stopped and why."""
    check_run(run)
    from offramp.cli.printing.console import out, print_line
    from offramp.cli.printing.explanation import print_explanation
    from offramp.commands.explain import explain

    settings = key_values(set_, "--set")
    explanation = explain(
        run,
        texts,
        budget=budget,
        max_loss=max_loss,
        risk=risk,
        latency=latency,
        max_disagreement=max_disagreement,
        settings=settings,
        html=html,
    )
    print_explanation(explanation, out)
    if html:
        print_line(f"written to {html}")
