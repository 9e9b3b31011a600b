"""Writing without ever losing what was there: new content goes beside the old and takes its place in one step."""

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

BESIDE = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.(new|old)")  # names of what stands beside while writing


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` if the block succeeds, and vanishes if it does not."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield fresh
        if fresh.is_dir():
            _swap(fresh, path)
        else:
            os.replace(fresh, path)
        _sweep(path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error
    finally:
        remove_path(fresh)


def write_error(path: Path, error: Exception) -> OfframpError:
    """The error for a place that cannot be written to."""
    final = "/".join(m["name"] if (m := BESIDE.fullmatch(part)) else part for part in str(path).split("/"))
    answer = (error.strerror if isinstance(error, OSError) else None) or error
    return OfframpError(
        f"to write {final}",
        f"the system's answer: {answer}",
        "make room on the disk or choose another place; what was there before is untouched",
    )


def remove_path(path: Path) -> None:
    """A file or folder goes, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _swap(fresh: Path, path: Path) -> None:
    """Put a finished folder in the place of another, which survives until then and comes back if that fails."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        if path.exists():
            os.replace(path, old)
        os.replace(fresh, path)
    except BaseException:
        if old.exists() and not path.exists():
            os.replace(old, path)
        raise
    remove_path(old)


def _sweep(path: Path) -> None:
    """Remove what writers of the same path left beside it when they were killed."""
    for left in path.parent.iterdir():
        match = BESIDE.fullmatch(left.name)
        if match and match["name"] == path.name and not _runs(int(match["pid"])):
            remove_path(left)


def _runs(pid: int) -> bool:
    if os.name == "nt":  # where signal 0 is no question but a Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's process
    return True


def write_text(path: Path, text: str) -> None:
    """Text, atomically."""
    with atomic_replace(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """JSON a person can read, atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """JSON, or a clear answer why not."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        given = f"no such file in {path.parent}"
        raise OfframpError(f"the file {path.name}", given, "check the folder's name, or train again") from error
    except (OSError, ValueError) as error:
        raise OfframpError(f"to read {path}", f"a damaged file ({error})", "restore it or train again") from error
