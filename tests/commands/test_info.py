"""`info` and `environment`: what a run folder holds, and what this machine is."""

from __future__ import annotations

import shutil
from pathlib import Path

import offramp
from offramp.commands.info import environment, info


def test_info_reads_the_description_and_the_points(trained: Path) -> None:
    found = info(trained)
    assert found.spec["method"] == "branchynet" and found.points is not None and found.points.metric == "accuracy"


def test_info_of_a_run_that_was_not_calibrated_has_no_points(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "points.json").unlink()
    assert info(run).points is None


def test_environment_names_versions_and_hardware() -> None:
    found = environment()
    assert found["offramp"] == offramp.__version__ and {"python", "torch", "transformers", "hardware"} <= found.keys()
