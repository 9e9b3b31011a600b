"""Work in a process of its own, and the memory that it needs.

Many models in one process share an allocator, so the memory of one of them cannot be measured there. A fresh process
imports the libraries first; the growth of its resident set from then on, at its highest (VmHWM − VmRSS of
/proc/self/status), is the memory of the work, including library code that is touched for the first time.
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
MEMORY_MEASURE = (
    "growth of the resident set of a fresh process beyond what it held with the libraries imported, at its highest"
)


class FreshRun(NamedTuple):
    """The result of work in a fresh process, and its peak memory."""

    result: Any
    peak_mb: float | None  # None if the system does not report it


def run_fresh(work: Callable[..., Any], *given: Any, library: str = "") -> FreshRun:
    """Run `work(*given)` in a fresh process; function, arguments and result must pickle. Errors are raised here.

    `library` is imported before memory is measured, if it is installed; OpenVINO without its telemetry.
    """
    servers = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if servers else "spawn")
    if servers:
        context.set_forkserver_preload(PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, work, given, library), daemon=True)  # type: ignore[attr-defined]
    process.start()
    sender.close()
    try:
        error, result, peak = receiver.recv()
    except EOFError:
        process.join()
        raise OfframpError(
            "work in a process of its own", f"a process that ended with {process.exitcode}", "give it more memory"
        ) from None
    finally:
        process.join(10)
        receiver.close()
    if error is not None:
        raise error
    return FreshRun(result, peak)


def _child(pipe: Connection, work: Callable[..., Any], given: tuple[Any, ...], library: str) -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    _import_library(library)
    before = resident("VmRSS")
    try:
        result, error = work(*given), None
    except Exception as raised:  # any error is sent back and raised in the other process
        result, error = None, _portable(raised)
    after = resident("VmHWM")
    pipe.send((error, result, None if before is None or after is None else after - before))
    pipe.close()


def _import_library(library: str) -> None:
    """Import a library if it is installed."""
    if importlib.util.find_spec(library or "-") is None:
        return
    if library == "openvino":
        importlib.import_module("offramp.engines.openvino.runtime").import_openvino()
    else:
        importlib.import_module(library)


def _portable(error: Exception) -> Exception:
    """Return an error that pickles: errors of other libraries may not, so their text is sent."""
    return error if isinstance(error, OfframpError) else RuntimeError(f"{type(error).__name__}: {error}")


def resident(field: str) -> float | None:
    """Return a memory field of this process, VmRSS or VmHWM, in megabytes."""
    if not STATUS.is_file():
        return None
    found = [line.split() for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
    return int(found[0][1]) * 1024 / 1e6 if found else None
