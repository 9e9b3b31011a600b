"""`offramp info`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.errors import OfframpError


def command(
    run: Annotated[str | None, typer.Argument(help="a folder that `offramp train` wrote")] = None,
    *,
    env: Annotated[bool, typer.Option("--env", help="versions and hardware instead")] = False,
) -> None:
    """What a run is and what it can do, or (--env) what this machine is."""
    from offramp.cli import console

    if env:
        console.show_environment()
    elif run:
        console.show_run(run)
    else:
        raise OfframpError("something to describe", "no run and no --env", "offramp info RUN, or offramp info --env")
