"""Where compiled graphs are kept between starts: the user's cache folder, another one, or nowhere.

A run folder carries no compiled code, so that a folder that was shared cannot bring any. `OFFRAMP_CACHE` (on the
command line `--cache`) is a folder, or `none`.
"""

from __future__ import annotations

import os
from pathlib import Path

from offramp.utils import files

VARIABLE, NOWHERE = "OFFRAMP_CACHE", "none"


def cache_folder(given: str | Path | None = None) -> Path | None:
    """Return the cache folder: the given one, that of the environment, or the user's; None for `none`."""
    chosen = str(given) if given is not None else os.environ.get(VARIABLE, "")
    if chosen == NOWHERE:
        return None
    return Path(chosen) if chosen else files.user_cache_folder()
