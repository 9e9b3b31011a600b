"""Where a run may be written, and the folder beside it that the work happens in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from offramp.errors import OfframpError
from offramp.model import folder as folders
from offramp.model.files import read_json, unwritable, write_json
from offramp.training import checkpoint


def check_free(out: Path, force: bool) -> None:
    """Nothing stands in `out`, or it may be replaced. Says so before any work is done."""
    if not out.name:
        raise OfframpError("a folder for the run", f"--out {out}", "give a new folder, e.g. --out runs/first")
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (force and folders.is_run(out)):
        raise OfframpError(
            f"to write the run {out}",
            "a finished run there" if folders.is_run(out) else "something else there",
            "choose another --out" + (", or say --force to replace it" if folders.is_run(out) else ""),
        )


def claim(out: Path, recipe: dict[str, Any], force: bool) -> Path:
    """The folder to work in, beside `out`; an unfinished run of another job is never overwritten unless forced."""
    partial = folders.working_folder(out)
    if int(os.environ.get("RANK", "0")) != 0:
        return partial
    same = (partial / "recipe.json").is_file() and read_json(partial / "recipe.json") == recipe
    if not same and not force and (partial / checkpoint.FILE).is_file():
        raise OfframpError(
            f"to train in {partial}",
            "an unfinished run with other settings or data",
            "run its own command again, choose another --out, or say --force to start over",
        )
    if not same or (force and not _sound(partial)):
        shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(partial, error) from error
    write_json(partial / "recipe.json", recipe)
    return partial


def _sound(partial: Path) -> bool:
    try:
        checkpoint.read_progress(partial)
        for best in partial.glob("stage-*/best.safetensors"):
            checkpoint.look(best)
    except OfframpError:
        return False
    return True
