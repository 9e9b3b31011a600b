"""The command line: plain typed functions, one file each; the folder is the list.

A command file exports `command`; its name is the command's. Heavy imports wait until a command runs, so that `--help`
answers at once. Files whose name starts with an underscore are shared pieces.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from offramp import __version__
from offramp.errors import OfframpError

INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell
ABOUT = "Transformers that spend only the compute an input needs."
FIRST = ["train", "calibrate", "search", "eval", "predict"]  # how help lists them: these, then the rest by name


def names() -> list[str]:
    """The commands there are: the files of this folder."""
    found = {path.stem for path in Path(__file__).parent.glob("[a-z]*.py")}
    return [name for name in FIRST if name in found] + sorted(found - set(FIRST))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="the version")] = False,
) -> None: ...


def _assemble() -> typer.Typer:
    made = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT)
    made.callback()(_root)
    for name in names():
        made.command(name)(import_module(f"{__name__}.{name}").command)
    return made


app = _assemble()


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: bad input is one clear message and exit code 2, Ctrl-C is 130; anything else is a bug and shows."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        try:
            app(args=arguments, standalone_mode=True)
        except OfframpError as error:
            typer.secho("offramp: " + str(error).replace("\n", "\n         "), err=True, fg="red")
            raise SystemExit(2) from None
        except (KeyboardInterrupt, SystemExit) as stop:
            if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:
                raise
            typer.echo("\nstopped; nothing that was complete is lost. Training goes on by the same command,", err=True)
            typer.echo("a search or a comparison with --resume.", err=True)
            raise SystemExit(INTERRUPTED) from None


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Our own warnings in a line; the rest (deprecations in libraries) is not for users of commands."""
    if category is UserWarning:
        typer.secho(f"offramp: {message}", err=True, fg="yellow")
