"""One process at a time trains in a working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from offramp.errors import OfframpError
from offramp.training import checkpoint
from offramp.training.run_lock import check_output_free, locked_working_folder
from offramp.utils.files import read_json


def test_locked_working_folder_refuses_a_second_process_and_keeps_its_files(tmp_path: Path) -> None:
    out, recipe = tmp_path / "run", {"seed": 1}
    with locked_working_folder(out, recipe, False) as partial:
        (partial / "stage-0").mkdir()
        with pytest.raises(OfframpError, match=str(partial)), locked_working_folder(out, recipe, True):
            pytest.fail("two processes were let in")
        assert (partial / "stage-0").is_dir()
    with locked_working_folder(out, recipe, False) as again:
        assert again == partial and (again / "stage-0").is_dir()


def test_locked_working_folder_starts_another_recipe_only_where_no_checkpoint_is_lost(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("force", [False, True])
def test_check_output_free_never_accepts_a_folder_that_is_not_a_run(tmp_path: Path, force: bool) -> None:
    check_output_free(tmp_path / "new", force)
    (tmp_path / "notes.txt").write_text("a file")
    with pytest.raises(OfframpError, match=str(tmp_path)):
        check_output_free(tmp_path, force)


def test_check_output_free_accepts_a_finished_run_only_with_force(tmp_path: Path) -> None:
    (tmp_path / "offramp.json").write_text("{}")
    check_output_free(tmp_path, force=True)
    with pytest.raises(OfframpError, match="--force"):
        check_output_free(tmp_path, force=False)
