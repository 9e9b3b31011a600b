"""Atomic writing: new content is written beside the old and replaces it in one step, so that nothing is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from offramp.errors import OfframpError

TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.(new|old)")  # names of files and folders while writing


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds and is removed if it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if temporary.is_dir():
            _replace_folder(temporary, path)
        else:
            os.replace(temporary, path)
        _remove_leftovers(path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error
    finally:
        remove_path(temporary)


def write_error(path: Path, error: Exception) -> OfframpError:
    """Return the error for a path that cannot be written."""
    final = "/".join(m["name"] if (m := TEMPORARY.fullmatch(part)) else part for part in str(path).split("/"))
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return OfframpError(
        f"to write {final}",
        f"the system's answer: {reason}",
        "make room on the disk or choose another place; the old content is untouched",
    )


def remove_path(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _replace_folder(new: Path, path: Path) -> None:
    """Replace a folder by a finished one; the old one is restored if that fails."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        if path.exists():
            os.replace(path, old)
        os.replace(new, path)
    except BaseException:
        if old.exists() and not path.exists():
            os.replace(old, path)
        raise
    remove_path(old)


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of the same path whose writers were killed."""
    for other in path.parent.iterdir():
        match = TEMPORARY.fullmatch(other.name)
        if match and match["name"] == path.name and not _is_running(int(match["pid"])):
            remove_path(other)


def _is_running(pid: int) -> bool:
    if os.name == "nt":  # there, signal 0 is a Ctrl-C and not a test
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # a process of another user
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_replace(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or raise an error that names the reason."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        given = f"no such file in {path.parent}"
        raise OfframpError(f"the file {path.name}", given, "check the folder's name, or train again") from error
    except (OSError, ValueError) as error:
        raise OfframpError(f"to read {path}", f"a damaged file ({error})", "restore it or train again") from error
