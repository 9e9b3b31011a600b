"""`offramp info` as functions: what a run folder holds, and what this machine is."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offramp import __version__, engines
from offramp.inference import operating_points as operating
from offramp.inference import run_folder as folders
from offramp.inference.hub import local_folder
from offramp.inference.operating_points import OperatingPoints
from offramp.utils.hardware import hardware


@dataclass(frozen=True)
class RunInfo:
    """The description of a run (its offramp.json) and its operating points, if it was calibrated."""

    spec: dict[str, Any]
    points: OperatingPoints | None


def info(run: str | Path) -> RunInfo:
    """Return what a run folder, or a run on the hub, holds, without loading its weights."""
    folder = local_folder(run)
    spec = folders.read_description(folder)
    return RunInfo(spec, operating.load_points(folder) if (folder / "points.json").is_file() else None)


def environment() -> dict[str, str]:
    """Return versions and hardware, for bug reports."""
    import accelerate
    import torch
    import transformers

    engine, reason = engines.explain_choice(engines.AUTO, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    packages = {name: version for name, version in engines.versions(engine).items() if name != "torch"}
    return {
        "offramp": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "hardware": hardware(),
        "engine": f"{engine} ({reason})",
        **packages,
    }
