"""The cache of compiled graphs: folders of models that were not used for long are removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offramp.utils import cache_folder


def test_only_the_folders_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MOST_FOLDERS", 3)
    for age in range(6):
        folder = tmp_path / f"model{age}"
        (folder / "openvino").mkdir(parents=True)
        os.utime(folder, (1000 - age, 1000 - age))
    (tmp_path / "a-file").write_text("stays")
    cache_folder.keep_recent_folders(tmp_path / "model5")  # the oldest, and used now
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-file", "model0", "model1", "model5"]
    cache_folder.keep_recent_folders(tmp_path / "missing" / "model")  # no error


def test_a_new_model_makes_room_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MOST_FOLDERS", 2)
    for age in range(3):
        (tmp_path / f"model{age}").mkdir()
        os.utime(tmp_path / f"model{age}", (1000 - age, 1000 - age))
    cache_folder.keep_recent_folders(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model0"]
