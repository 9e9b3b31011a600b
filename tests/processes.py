"""Commands in processes of their own, which tests may kill.

Processes are forked from a server that has imported torch already, so that a kill-and-resume test costs a fraction of a
second per process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOAD = [  # what a command imports
    "offramp.cli",
    "offramp.methods.deebert",
    "offramp.cli.printing.tables",
    "offramp.tasks.classification",
    "offramp.commands.train",
    "sklearn.metrics",
    "tests.factories",
    "transformers.models.bert.modeling_bert",
]


def start_command(arguments: Sequence[str], log: Path, first: Callable[[], None] | None = None) -> BaseProcess:
    """Start `offramp ARGUMENTS` in a process that writes to `log`; `first` is called in it before the command."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    process = server.Process(target=_run_command, args=(list(arguments), str(log), first))
    process.start()
    return process


def wait_for_command(process: BaseProcess, seconds: float = 60.0) -> int:
    """Wait for a command and return its exit code, negative for a signal."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the command was still running after {seconds} s")
    return process.exitcode


def _run_command(arguments: list[str], log: str, first: Callable[[], None] | None) -> None:
    from offramp import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server it was forked from ignores Ctrl-C
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["offramp", *arguments]
    if first:
        first()
    cli.main(arguments)
