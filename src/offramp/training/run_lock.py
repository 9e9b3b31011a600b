"""Where a run may be written, and the folder beside it that the work happens in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from offramp.errors import OfframpError
from offramp.inference import run_folder as folders
from offramp.training import checkpoint
from offramp.utils.files import read_json, unwritable, write_json

LOCK_FILE = "lock"


def check_output_free(out: Path, force: bool) -> None:
    """Nothing stands in `out`, or it may be replaced. Says so before any work is done."""
    if not out.name:
        raise OfframpError("a folder for the run", f"--out {out}", "give a new folder, e.g. --out runs/first")
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (force and folders.is_run(out)):
        raise OfframpError(
            f"to write the run {out}",
            "a finished run there" if folders.is_run(out) else "something else there",
            "choose another --out" + (", or say --force to replace it" if folders.is_run(out) else ""),
        )


@contextmanager
def locked_working_folder(out: Path, recipe: dict[str, Any], force: bool) -> Iterator[Path]:
    """The folder to work in, beside `out`, ours alone for as long as this lasts.

    The same command started twice would write over its own checkpoints, so a lock stands in there; the system takes it
    away with the process that held it.
    """
    partial = folders.working_folder(out)
    if int(os.environ.get("RANK", "0")) != 0:
        yield partial
        return
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = FileLock(partial / LOCK_FILE, timeout=0)
        lock.acquire()
    except Timeout as error:
        way = "wait for it, stop it, or choose another --out"
        raise OfframpError(f"to train in {partial}", "another process that trains there right now", way) from error
    except OSError as error:
        raise unwritable(partial, error) from error
    try:
        _take(partial, recipe, force)
        yield partial
    finally:
        lock.release()


def _take(partial: Path, recipe: dict[str, Any], force: bool) -> None:
    """An unfinished run of another job is never overwritten unless forced."""
    same = (partial / "recipe.json").is_file() and read_json(partial / "recipe.json") == recipe
    if not same and not force and (partial / checkpoint.CHECKPOINT_FILE).is_file():
        raise OfframpError(
            f"to train in {partial}",
            "an unfinished run with other settings or data",
            "run its own command again, choose another --out, or say --force to start over",
        )
    if not same or (force and not _sound(partial)):
        for old in partial.iterdir():
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            elif old.name != LOCK_FILE:
                old.unlink()
    write_json(partial / "recipe.json", recipe)


def _sound(partial: Path) -> bool:
    try:
        checkpoint.read_progress(partial)
        for best in partial.glob("stage-*/best.safetensors"):
            checkpoint.check_readable(best)
    except OfframpError:
        return False
    return True
