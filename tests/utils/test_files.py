"""Atomic writing: new content replaces the old in one step, or the old content stays."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from offramp.errors import OfframpError
from offramp.utils.files import (
    atomic_replace,
    check_not_input,
    check_output_file,
    read_json,
    user_cache_folder,
    write_json,
    write_text,
)
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


def test_a_path_without_a_name_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path(""), Path("/")):
        with pytest.raises(OfframpError, match="to write"):
            write_text(path, "lost")


def test_check_output_file_refuses_what_cannot_become_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    for usable in (None, "-", "/dev/null", tmp_path / "file", tmp_path / "new" / "deep" / "file"):
        check_output_file(usable)
    for name, reason in {
        "folder": "folder",
        "link": "folder",
        "file/below": "file is a file",
        "none/": "folder",
    }.items():
        with pytest.raises(OfframpError, match=reason):
            check_output_file(f"{tmp_path}/{name}")
    with pytest.raises(OfframpError, match="no name"):
        check_output_file("")
    with pytest.raises(OfframpError, match="which is read"):
        check_output_file(tmp_path / "file", tmp_path / "file")


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


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"


def test_a_link_to_nothing_creates_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"


def test_a_fifo_is_written_to_as_a_stream(tmp_path: Path) -> None:
    pipe, received = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()), daemon=True)
    reader.start()
    write_json(pipe, {"a": 1})
    reader.join(10)
    assert received == ['{\n  "a": 1\n}\n'] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(os.devnull)
    for path in (Path(os.devnull), tmp_path / "link"):
        write_text(path, "text")
        assert stat.S_ISCHR(path.stat().st_mode)


def test_a_full_device_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="/dev/full"):
        write_text(Path("/dev/full"), "text")


def test_a_minus_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_json(Path("-"), [1])
    assert capsys.readouterr().out == "[\n  1\n]\n" and not Path("-").exists()


def test_the_mode_of_a_replaced_file_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o600)
    write_text(tmp_path / "file", "new")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_check_not_input_refuses_an_input_under_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("rows")
    Path("link").symlink_to("rows.jsonl")
    os.link("rows.jsonl", "other")
    for name in ("rows.jsonl", "./rows.jsonl", str(tmp_path / "rows.jsonl"), "link", "other"):
        with pytest.raises(OfframpError, match=re.escape(name)):
            check_not_input(name, None, "rows.jsonl")
    with pytest.raises(OfframpError, match=r"rows\.jsonl"):
        check_not_input(tmp_path, "rows.jsonl")
    for free in ("new.jsonl", "-", os.devnull, None):
        check_not_input(free, "rows.jsonl", "-", "nowhere.jsonl")


def test_check_not_input_refuses_to_replace_a_file_of_a_folder_that_is_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "points.json").write_text("{}")
    (tmp_path / "link").symlink_to(run)
    for output in (run / "points.json", tmp_path / "link" / "points.json"):
        with pytest.raises(OfframpError, match=r"points\.json, a file of"):
            check_not_input(output, "rows.jsonl", run)
    check_not_input(run / "new.json", run)


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "offramp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / ".cache" / "offramp"
