"""Atomic writing: new content replaces the old in one step, or the old content stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from offramp.errors import OfframpError
from offramp.utils.files import atomic_replace, read_json, write_json, write_text
from tests import factories

DEAD = 2**22 + 1  # larger than any process id


def folder_of(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "a").write_text(text)
    return path


def test_write_text_replaces_a_file_and_creates_its_folder(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "file", "one")
    write_text(tmp_path / "new" / "file", "two")
    assert factories.read_files(tmp_path) == {"new/file": b"two"}


def test_read_json_returns_what_write_json_wrote(tmp_path: Path) -> None:
    content = {"name": "naïve …", "list": [1, 2.5, None]}
    write_json(tmp_path / "file.json", content)
    assert read_json(tmp_path / "file.json") == content
    assert "naïve" in (tmp_path / "file.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("stop", [OSError(errno.ENOSPC, "No space left"), SafetensorError("No space left")])
def test_a_failed_write_keeps_the_old_file_and_names_it(tmp_path: Path, stop: Exception) -> None:
    write_text(tmp_path / "file", "old")
    with pytest.raises(OfframpError, match="No space left") as caught, atomic_replace(tmp_path / "file") as temporary:
        temporary.write_text("half of the n")
        raise stop
    assert f"to write {tmp_path / 'file'}" == caught.value.asked
    assert factories.read_files(tmp_path) == {"file": b"old"}


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_an_interrupted_write_keeps_the_old_folder(tmp_path: Path, stop: type[BaseException]) -> None:
    old = folder_of(tmp_path / "folder", "old")
    with pytest.raises(stop), atomic_replace(old) as temporary:
        folder_of(temporary, "new")
        raise stop
    assert factories.read_files(tmp_path) == {"folder/a": b"old"}


def test_atomic_replace_replaces_all_of_a_folder(tmp_path: Path) -> None:
    old = folder_of(tmp_path / "folder", "old")
    (old / "b").write_text("gone afterwards")
    with atomic_replace(old) as temporary:
        folder_of(temporary, "new")
        assert (old / "a").read_text() == "old", "the old folder stays while the new one is written"
    assert factories.read_files(tmp_path) == {"folder/a": b"new"}


def test_atomic_replace_replaces_a_file_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "thing").write_text("a file")
    with atomic_replace(tmp_path / "thing") as temporary:
        folder_of(temporary, "new")
    assert factories.read_files(tmp_path) == {"thing/a": b"new"}


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("stop", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_the_old_folder_is_restored_if_the_replacement_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, stop: BaseException
) -> None:
    old, calls, real = folder_of(tmp_path / "folder", "old"), 0, os.replace

    def replace(a: Any, b: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise stop
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises((OfframpError, KeyboardInterrupt)), atomic_replace(old) as temporary:
        folder_of(temporary, "new")
    assert factories.read_files(tmp_path) == {"folder/a": b"old"}


def test_temporary_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    folder_of(tmp_path / f".file.{DEAD}.new", "dead")
    (tmp_path / f".file.{DEAD}.old").write_text("dead")
    (tmp_path / f".file.{os.getppid()}.new").write_text("still at work")
    (tmp_path / f".other.{DEAD}.new").write_text("of another file")
    write_text(tmp_path / "file", "new")
    left = {f".file.{os.getppid()}.new": b"still at work", f".other.{DEAD}.new": b"of another file"}
    assert factories.read_files(tmp_path) == {"file": b"new", **left}


def test_errors_name_the_final_path_and_not_the_temporary_one(tmp_path: Path) -> None:
    with pytest.raises(OfframpError) as caught, atomic_replace(tmp_path / "run") as temporary:
        temporary.mkdir()
        with atomic_replace(temporary / "points.json"):
            raise OSError(errno.EACCES, "Permission denied")
    assert f"to write {tmp_path / 'run' / 'points.json'}" == caught.value.asked


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), (b"{", "damaged"), (b"\xff", "damaged")])
def test_read_json_refuses_missing_and_damaged_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(OfframpError, match=message):
        read_json(tmp_path / "file.json")
