"""Where compiled graphs and packed weights are kept between starts: the user's cache folder, another one, or nowhere.

A run folder carries no compiled code, so that a folder that was shared cannot bring any. `OFFRAMP_CACHE` (on the
command line `--cache`) is a folder, or `none`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from offramp.utils import files

VARIABLE, NOWHERE = "OFFRAMP_CACHE", "none"
MOST_FOLDERS = 32  # of models whose compiled graphs are kept


def cache_folder(given: str | Path | None = None) -> Path | None:
    """Return the cache folder: the given one, that of the environment, or the user's; None for `none`."""
    chosen = str(given) if given is not None else os.environ.get(VARIABLE, "")
    if chosen == NOWHERE:
        return None
    return Path(chosen) if chosen else files.user_cache_folder()


def keep_recent_folders(folder: Path) -> None:
    """Mark the folder of one model as used, and remove those that were not used for longest where there are many.

    A model that is trained again has other weights and a folder of its own: without this, old ones would stay for ever.
    """
    with contextlib.suppress(OSError):
        if folder.is_dir():
            os.utime(folder)
        others = [one for one in folder.parent.iterdir() if one != folder and one.is_dir() and not one.is_symlink()]
        others.sort(key=lambda one: one.stat().st_mtime, reverse=True)
        for old in others[MOST_FOLDERS - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
