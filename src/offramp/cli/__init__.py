"""The command line: one file for each command, and the folder is the list of commands.

A command file exports `command`, a function whose parameters are the options; its name is the command's. A command is
imported when it is used, and torch only when it runs, so that `--help` is quick. Files whose name starts with an
underscore are shared, `printing/` holds what commands print.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from offramp import __version__
from offramp.errors import OfframpError

INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell
ABOUT = "Transformers that spend only the compute an input needs."
FIRST = ("attach", "train", "calibrate", "eval", "predict")  # how help lists them: these, then the others by name
MOVED = {  # commands of earlier versions, and where they went
    "new": "offramp train --from-scratch --model FAMILY",
    "search": "offramp calibrate --search",
    "version": "offramp --version",
    "depths": "python benchmarks/papers/faster_dat.py",
    "lengths": "python benchmarks/speed_by_length.py",
    "guarantee": "python benchmarks/guarantee.py",
    "rationales": "python benchmarks/papers/adapler.py",
    "baseline": "python benchmarks/baseline.py",
}


def names() -> list[str]:
    """Return the names of all commands: the files of this folder."""
    found = {path.stem for path in Path(__file__).parent.glob("[a-z]*.py")}
    return [name for name in FIRST if name in found] + sorted(found.difference(FIRST))


class CommandGroup(TyperGroup):
    """The commands of this folder, each imported when it is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command by name; None if there is none."""
        if cmd_name not in names():
            if cmd_name in MOVED:
                fix = f"`offramp {cmd_name}` is now `{MOVED[cmd_name]}`"
                raise OfframpError(f"the command `offramp {cmd_name}`", "a command of an earlier version", fix)
            return None
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name)(import_module(f"{__name__}.{cmd_name}").command)
        return typer.main.get_command(alone)


app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None: ...


def main(arguments: list[str] | None = None) -> Any:
    """Run a command: bad input gives one message and exit code 2, Ctrl-C gives 130; other exceptions are bugs."""
    _open_closed_streams()
    with _sigterm_as_ctrl_c(), warnings.catch_warnings():
        warnings.showwarning = _print_warning
        try:
            app(args=arguments, standalone_mode=True)
        except OfframpError as error:
            _print_error(error)
            raise SystemExit(2) from None
        except OSError as error:  # a full disk behind standard output, a folder without permission
            _discard_output()
            fix = "make room, or choose a place that you may read and write"
            _print_error(OfframpError(f"to read or write {error.filename or 'standard output'}", _reason(error), fix))
            raise SystemExit(2) from None
        except (KeyboardInterrupt, SystemExit) as stop:
            if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:
                raise
            typer.echo("\nstopped; nothing that was complete is lost. Training goes on by the same command,", err=True)
            typer.echo("a search or a comparison with --resume.", err=True)
            raise SystemExit(INTERRUPTED) from None


def _print_error(error: OfframpError) -> None:
    typer.secho("offramp: " + str(error).replace("\n", "\n         "), err=True, fg="red")


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _open_closed_streams() -> None:
    """Open the null device in place of standard streams that are closed, so that no file of ours takes their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                file = os.open(os.devnull, os.O_RDWR)
                if file != number:
                    os.dup2(file, number)
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))  # noqa: SIM115  # for the whole process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names of files may hold bytes that are no text


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM stop a command as Ctrl-C does; training saves its state first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _discard_output() -> None:
    """Drop what standard output could not take, or Python would try to write it once more when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _print_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Print Offramp's own warnings in a line; others (deprecations in libraries) are not for users of commands."""
    if category is UserWarning:
        typer.secho(f"offramp: {message}", err=True, fg="yellow")
