"""Paths of run folders: how a finished run or a name on the hub is recognised, and where a run is trained."""

from __future__ import annotations

import re
from pathlib import Path

DESCRIPTION_FILE = "offramp.json"  # a folder that holds it is a finished run
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a finished run."""
    return (folder / DESCRIPTION_FILE).is_file()


def working_folder(out: Path) -> Path:
    """Return the folder beside `out` that its run is trained in."""
    return out.with_name(out.name + ".partial")


def is_hub_name(source: str | Path) -> bool:
    """Return whether `source` can only be a name on the hub: `user/name`, and no folder that could be meant exists."""
    path = Path(source)
    if not isinstance(source, str) or not HUB_NAME.fullmatch(source) or path.exists():
        return False
    return not path.parent.is_dir() and not working_folder(path).exists()
