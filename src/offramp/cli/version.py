"""`offramp version`."""

from __future__ import annotations

import typer

from offramp import __version__


def command() -> None:
    """The version."""
    typer.echo(__version__)
