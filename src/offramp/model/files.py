"""Writing without ever losing what was there: new content goes beside the old and takes its place in one step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offramp.errors import OfframpError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` if the block succeeds, and vanishes if it does not."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        yield fresh
        if fresh.is_dir():
            _swap(fresh, path)
        else:
            os.replace(fresh, path)
    except OSError as error:
        raise OfframpError(
            f"to write {path}", f"the system's answer: {error.strerror or error}", "free some disk space or choose another folder"
        ) from error
    finally:
        if fresh.is_dir():
            shutil.rmtree(fresh, ignore_errors=True)
        else:
            fresh.unlink(missing_ok=True)


def _swap(fresh: Path, path: Path) -> None:
    """Put a finished folder in the place of another, which survives until then."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    if path.exists():
        os.replace(path, old)
    os.replace(fresh, path)
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Text, atomically."""
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """JSON a person can read, atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """JSON, or a clear answer why not."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OfframpError(f"the file {path.name}", f"no such file in {path.parent}", "check the folder's name") from error
    except (OSError, ValueError) as error:
        raise OfframpError(f"to read {path}", f"a damaged file ({error})", "restore it or train again") from error
