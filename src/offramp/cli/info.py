"""`offramp info`."""

from __future__ import annotations

from typing import Annotated

import typer

from offramp.cli._options import check_run
from offramp.errors import OfframpError


def command(
    run: Annotated[str | None, typer.Argument(help="a run folder (of `offramp train` or `attach`)")] = None,
    *,
    env: Annotated[bool, typer.Option("--env", help="versions and hardware instead")] = False,
) -> None:
    """Describe a run and its operating points, or (--env) the versions and hardware of this machine."""
    if run is not None and not env:
        check_run(run)
    from offramp.cli.printing.tables import print_environment, print_run
    from offramp.commands import info

    if env:
        print_environment(info.environment())
    elif run:
        print_run(run, info.info(run))
    else:
        raise OfframpError("something to describe", "no run and no --env", "offramp info RUN, or offramp info --env")
