"""Paths of run folders: how a finished run is recognised, and where it is trained before it takes its place."""

from __future__ import annotations

from pathlib import Path

DESCRIPTION_FILE = "offramp.json"  # a folder that holds it is a finished run


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a finished run."""
    return (folder / DESCRIPTION_FILE).is_file()


def working_folder(out: Path) -> Path:
    """Return the folder beside `out` that its run is trained in."""
    return out.with_name(out.name + ".partial")
