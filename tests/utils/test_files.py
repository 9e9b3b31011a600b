"""Writing takes the place of what was there in one step, or does not happen at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from offramp.errors import OfframpError
from offramp.utils.files import atomic_replace, read_json, write_json, write_text
from tests import runs

DEAD = 2**22 + 1  # beyond the largest process id there is


def folder_of(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "a").write_text(text)
    return path


def test_a_file_is_replaced_and_its_folder_made(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "file", "one")
    write_text(tmp_path / "new" / "file", "two")
    assert runs.files(tmp_path) == {"new/file": b"two"}


def test_json_round_trip(tmp_path: Path) -> None:
    content = {"name": "naïve …", "list": [1, 2.5, None]}
    write_json(tmp_path / "file.json", content)
    assert read_json(tmp_path / "file.json") == content
    assert "naïve" in (tmp_path / "file.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("stop", [OSError(errno.ENOSPC, "No space left"), SafetensorError("No space left")])
def test_a_failure_while_writing_keeps_the_old(tmp_path: Path, stop: Exception) -> None:
    write_text(tmp_path / "file", "old")
    with pytest.raises(OfframpError, match="No space left") as caught, atomic_replace(tmp_path / "file") as fresh:
        fresh.write_text("half of the n")
        raise stop
    assert f"to write {tmp_path / 'file'}" == caught.value.asked
    assert runs.files(tmp_path) == {"file": b"old"}


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_other_ends_keep_the_old_too(tmp_path: Path, stop: type[BaseException]) -> None:
    old = folder_of(tmp_path / "folder", "old")
    with pytest.raises(stop), atomic_replace(old) as fresh:
        folder_of(fresh, "new")
        raise stop
    assert runs.files(tmp_path) == {"folder/a": b"old"}


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    old = folder_of(tmp_path / "folder", "old")
    (old / "b").write_text("gone afterwards")
    with atomic_replace(old) as fresh:
        folder_of(fresh, "new")
        assert (old / "a").read_text() == "old", "the old one stands while the new one is written"
    assert runs.files(tmp_path) == {"folder/a": b"new"}


def test_a_file_gives_way_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "thing").write_text("a file")
    with atomic_replace(tmp_path / "thing") as fresh:
        folder_of(fresh, "new")
    assert runs.files(tmp_path) == {"thing/a": b"new"}


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("stop", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(
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
    with pytest.raises((OfframpError, KeyboardInterrupt)), atomic_replace(old) as fresh:
        folder_of(fresh, "new")
    assert runs.files(tmp_path) == {"folder/a": b"old"}


def test_what_killed_writers_left_is_swept_away(tmp_path: Path) -> None:
    folder_of(tmp_path / f".file.{DEAD}.new", "dead")
    (tmp_path / f".file.{DEAD}.old").write_text("dead")
    (tmp_path / f".file.{os.getppid()}.new").write_text("still at work")
    (tmp_path / f".other.{DEAD}.new").write_text("somebody else's")
    write_text(tmp_path / "file", "new")
    left = {f".file.{os.getppid()}.new": b"still at work", f".other.{DEAD}.new": b"somebody else's"}
    assert runs.files(tmp_path) == {"file": b"new", **left}


def test_the_message_names_the_place_people_know(tmp_path: Path) -> None:
    with pytest.raises(OfframpError) as caught, atomic_replace(tmp_path / "run") as fresh:
        fresh.mkdir()
        with atomic_replace(fresh / "points.json"):
            raise OSError(errno.EACCES, "Permission denied")
    assert f"to write {tmp_path / 'run' / 'points.json'}" == caught.value.asked


@pytest.mark.parametrize(("content", "said"), [(None, "no such file"), (b"{", "damaged"), (b"\xff", "damaged")])
def test_reading_what_is_not_there_or_no_json(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(OfframpError, match=said):
        read_json(tmp_path / "file.json")
