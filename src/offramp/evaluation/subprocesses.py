"""Work done in a process of its own, and how much memory that took.

Many models in one process share an allocator, so none of them can be asked what it holds. A fresh process imports the
libraries first; what its resident set grows by from there on, at its highest (VmHWM − VmRSS of /proc/self/status), is
the work's, library code that is touched for the first time included.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from offramp.errors import OfframpError

STATUS = Path("/proc/self/status")
PRELOAD = ["torch", "transformers", "offramp.inference.predictor", "offramp.evaluation.peers"]
HOW = "growth of the resident set of a fresh process beyond what it held with the libraries imported, at its highest"


class FreshRun(NamedTuple):
    """What came of it."""

    result: Any
    peak_mb: float | None  # None where the system does not tell


def run_fresh(work: Callable[..., Any], *given: Any, library: str = "") -> FreshRun:
    """`work(*given)` in a fresh process; all of it must pickle. What goes wrong there is raised here.

    `library` is imported beforehand, if there is one of that name; OpenVINO without its telemetry.
    """
    servers = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if servers else "spawn")
    if servers:
        context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, work, given, library), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    try:
        error, result, peak = ours.recv()
    except EOFError:
        process.join()
        raise OfframpError(
            "work in a process of its own", f"a process that ended with {process.exitcode}", "give it more memory"
        ) from None
    finally:
        process.join(10)
        ours.close()
    if error is not None:
        raise error
    return FreshRun(result, peak)


def _child(pipe: Connection, work: Callable[..., Any], given: tuple[Any, ...], library: str) -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    _bring(library)
    before = resident("VmRSS")
    try:
        result, error = work(*given), None
    except Exception as raised:  # whatever it is, the other side must hear of it
        result, error = None, _portable(raised)
    after = resident("VmHWM")
    pipe.send((error, result, None if before is None or after is None else after - before))
    pipe.close()


def _bring(library: str) -> None:
    """Import a library, if there is one of that name."""
    if importlib.util.find_spec(library or "-") is None:
        return
    if library == "openvino":
        importlib.import_module("offramp.engines.openvino.runtime").library()
    else:
        importlib.import_module(library)


def _portable(error: Exception) -> Exception:
    """Errors of foreign libraries may not pickle: their text does."""
    return error if isinstance(error, OfframpError) else RuntimeError(f"{type(error).__name__}: {error}")


def resident(field: str) -> float | None:
    """A field of this process's memory, VmRSS or VmHWM, in megabytes."""
    if not STATUS.is_file():
        return None
    found = [line.split() for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
    return int(found[0][1]) * 1024 / 1e6 if found else None
