"""Compiled graphs on disk: bound to their model and content, checked when read, never in the way."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offramp
from offramp.engines.openvino.cache import PARTIAL
from offramp.errors import OfframpError
from offramp.training.schedule import Schedule
from offramp.utils.cache_folder import VARIABLE, cache_folder
from tests import factories

TEXTS = [row["text"] for row in factories.labelled_rows("classification", 6, 5)]


def answers(run: Path, cache: Path | str) -> list[dict[str, Any]]:
    return offramp.load(run, engine="openvino", cache=cache).predict(TEXTS, 1.0)


def blobs(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.blob"))


def check_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    json.dumps(found, allow_nan=False)
    for one, other in zip(found, expected, strict=True):
        assert one["label"] == other["label"] and one["scores"] == pytest.approx(other["scores"], abs=1e-4)


def test_graphs_are_read_again(trained: Path, tmp_path: Path) -> None:
    first = answers(trained, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in blobs(tmp_path)}
    check_equal(answers(trained, tmp_path), first)
    assert before and {path: path.stat().st_mtime_ns for path in blobs(tmp_path)} == before


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "zeros"])
def test_a_damaged_file_is_discarded_and_written_again(trained: Path, tmp_path: Path, damage: str) -> None:
    expected = answers(trained, tmp_path)
    for path in blobs(tmp_path):
        content = bytearray(path.read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 255
        path.write_bytes({"flip": content, "cut": content[:-100], "empty": b"", "zeros": bytes(len(content))}[damage])
    damaged = {path.name: path.read_bytes() for path in blobs(tmp_path)}
    check_equal(answers(trained, tmp_path), expected)
    written = {path.name: path.read_bytes() for path in blobs(tmp_path)}
    assert len(written) == len(damaged) and not set(written.values()) & set(damaged.values())


def test_another_models_graph_under_a_fitting_name_is_discarded(base: str, trained: Path, tmp_path: Path) -> None:
    """Its content is undamaged, so that only a comparison with torch can tell."""
    (tmp_path / "other").mkdir()
    quick = Schedule(epochs=1, batch_size=8, lr=0.01, seed=7)
    other = factories.run_folder(base, tmp_path / "other", "branchynet", schedule=quick)
    expected = answers(trained, tmp_path / "first")
    answers(other, tmp_path / "second")
    foreign = {path.name.split(".")[0]: path for path in blobs(tmp_path / "second")}
    for path in blobs(tmp_path / "first"):
        name, own, _, ending = path.name.split(".")
        source = foreign[name]
        digest = source.name.split(".")[2]
        path.unlink()
        shutil.copy(source, path.with_name(f"{name}.{own}.{digest}.{ending}"))
    check_equal(answers(trained, tmp_path / "first"), expected)


def test_leftovers_of_killed_processes_are_removed(trained: Path, tmp_path: Path) -> None:
    answers(trained, tmp_path)
    folder = blobs(tmp_path)[0].parent
    for path in blobs(tmp_path):
        path.unlink()
    dead, alive = folder / f"layer.abc.1.99999999{PARTIAL}", folder / f"layer.abc.1.{os.getpid()}{PARTIAL}"
    dead.write_bytes(b"x")
    alive.write_bytes(b"x")
    answers(trained, tmp_path)
    assert not dead.exists() and alive.exists()


def test_a_folder_that_cannot_be_written_only_disables_the_cache(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    check_equal(answers(trained, tmp_path / "file"), answers(trained, "none"))


def test_a_full_disk_leaves_no_partial_file(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    assert answers(trained, tmp_path) and not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_cache_folder_is_the_users_unless_another_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "offramp" and cache_folder(tmp_path / "x") == tmp_path / "x"
    monkeypatch.setenv(VARIABLE, "none")
    assert cache_folder() is None and cache_folder(tmp_path) == tmp_path


def test_nan_never_leaves_as_an_answer(trained: Path) -> None:
    model = offramp.load(trained, engine="torch")
    head = next(model.network.hf.classifier.parameters())
    head.data[:] = np.nan
    with pytest.raises(OfframpError, match="NaN"):
        model.predict(TEXTS, 1.0)
