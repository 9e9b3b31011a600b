"""A folder to work in belongs to one process at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from offramp.errors import OfframpError
from offramp.training import checkpoint
from offramp.training.run_lock import locked_working_folder
from offramp.utils.files import read_json


def test_the_same_command_twice(tmp_path: Path) -> None:
    out, recipe = tmp_path / "run", {"seed": 1}
    with locked_working_folder(out, recipe, False) as partial:
        (partial / "stage-0").mkdir()
        with (
            pytest.raises(OfframpError, match="another process that trains there"),
            locked_working_folder(out, recipe, True),
        ):
            pytest.fail("two had it")
        assert (partial / "stage-0").is_dir()  # nothing was touched
    with locked_working_folder(out, recipe, False) as again:
        assert again == partial and (again / "stage-0").is_dir()  # goes on


def test_another_job_starts_over_only_where_nothing_is_lost(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with locked_working_folder(out, {"seed": 1}, False) as partial:
        (partial / "stage-0").mkdir()
    with locked_working_folder(out, {"seed": 2}, False):
        assert read_json(partial / "recipe.json") == {"seed": 2} and not (partial / "stage-0").exists()
        (partial / checkpoint.CHECKPOINT_FILE).write_text("half of it")
    with pytest.raises(OfframpError, match="other settings"), locked_working_folder(out, {"seed": 3}, False):
        pytest.fail("a checkpoint was there")
    with locked_working_folder(out, {"seed": 3}, True):
        assert not (partial / checkpoint.CHECKPOINT_FILE).exists()
