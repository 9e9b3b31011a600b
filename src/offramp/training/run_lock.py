"""Where a run may be written, and the locked folder beside it that the training happens in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from offramp.errors import OfframpError
from offramp.training import checkpoint
from offramp.training.processes import is_main_process
from offramp.utils.files import read_json, write_error, write_json
from offramp.utils.run_paths import is_run, working_folder

LOCK_FILE = "lock"
LONGEST_NAME = 220  # bytes of a run's name: with what is added while writing, most file systems take 255


def check_output_free(out: Path, force: bool) -> None:
    """Raise an error, before any work is done, unless `out` is empty or may be replaced."""
    if out.name in ("", ".."):
        raise OfframpError("a folder for the run", f"--out {out}", "give a new folder, e.g. --out runs/first")
    if len(os.fsencode(out.name)) > LONGEST_NAME:
        given = f"a name of {len(os.fsencode(out.name))} bytes: {out.name[:40]}…"
        raise OfframpError("a folder for the run", given, f"give a name of at most {LONGEST_NAME} bytes")
    if out.is_symlink() and not out.exists():
        given = f"{out}, a link to {os.readlink(out)}, which does not exist"
        raise OfframpError("a folder for the run", given, "create that folder, or choose another --out")
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (force and is_run(out)):
        raise OfframpError(
            f"to write the run {out}",
            "a finished run there" if is_run(out) else "something else there",
            "choose another --out" + (", or say --force to replace it" if is_run(out) else ""),
        )


@contextmanager
def locked_working_folder(out: Path, recipe: dict[str, Any], force: bool) -> Iterator[Path]:
    """Yield the folder beside `out` to train in, locked against other processes inside the block.

    The same command started twice would overwrite its own checkpoints, so the folder contains a file lock, which the
    operating system releases when the process that holds it ends.
    """
    partial = working_folder(out)
    if not is_main_process():  # it only reads: the main process holds the lock for all
        yield partial
        return
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = FileLock(partial / LOCK_FILE, timeout=0)
        lock.acquire()
    except Timeout as error:
        fix = "wait for it, stop it, or choose another --out"
        raise OfframpError(f"to train in {partial}", "another process that trains there right now", fix) from error
    except OSError as error:
        raise write_error(partial, error) from error
    try:
        _prepare(partial, recipe, force)
        yield partial
    finally:
        lock.release()


def _prepare(partial: Path, recipe: dict[str, Any], force: bool) -> None:
    """Clear the folder for this recipe, unless it holds the same recipe's unfinished run.

    An unfinished run of another recipe is overwritten only with `force`.
    """
    same = (partial / "recipe.json").is_file() and read_json(partial / "recipe.json") == recipe
    if not same and not force and (partial / checkpoint.CHECKPOINT_FILE).is_file():
        raise OfframpError(
            f"to train in {partial}",
            "an unfinished run with other settings or data",
            "run its own command again, choose another --out, or say --force to start over",
        )
    if not same or (force and not _is_readable(partial)):
        for old in partial.iterdir():
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            elif old.name != LOCK_FILE:
                old.unlink()
    write_json(partial / "recipe.json", recipe)


def _is_readable(partial: Path) -> bool:
    try:
        checkpoint.read_progress(partial)
        for best in partial.glob("stage-*/best.safetensors"):
            checkpoint.check_readable(best)
    except OfframpError:
        return False
    return True
