"""Writing files: new content is written beside the old and replaces it in one step, so that nothing is lost.

Only regular files and folders are replaced. A symbolic link is followed and stays; devices, FIFOs and `-` (standard
output) are written to as streams.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from offramp.errors import OfframpError

STANDARD_OUTPUT = "-"
PARTIAL = ".partial"  # ending of a file that was not finished
TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.(new|old)")  # names of files and folders while writing


@contextmanager
def atomic_replace(path: Path, keep_unfinished: bool = False) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds and is removed if it does not.

    Of a symbolic link the target is replaced. A stream (see `is_stream`) is yielded itself. With `keep_unfinished` a
    file that could not be finished becomes NAME.partial, and a warning names it.
    """
    if is_stream(path):
        try:
            yield Path("/dev/stdout") if str(path) == STANDARD_OUTPUT else path
        except OSError as error:
            raise write_error(path, error) from error
        return
    final = Path(os.path.realpath(path)) if path.is_symlink() else path
    if not final.name:  # the root, or nothing at all
        raise write_error(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    temporary = final.with_name(f".{final.name}.{os.getpid()}.new")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if temporary.is_dir():
            _replace_folder(temporary, final)
        else:
            if final.is_file():
                shutil.copymode(final, temporary)
            os.replace(temporary, final)
        _remove_leftovers(final)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error
    finally:
        if keep_unfinished:  # where the block succeeded it has gone
            _keep_unfinished(temporary, final.with_name(final.name + PARTIAL))
        remove_path(temporary)


def _keep_unfinished(temporary: Path, partial: Path) -> None:
    """Keep a file that holds something under a name that tells that it is not whole."""
    with suppress(OSError):
        if temporary.is_file() and temporary.stat().st_size > 0:
            os.replace(temporary, partial)
            warnings.warn(f"stopped early: what was written until then is in {partial}", stacklevel=2)


def is_stream(path: Path) -> bool:
    """Return whether a path is written to and never replaced: `-`, a device, a FIFO, a socket, or a link to one."""
    return str(path) == STANDARD_OUTPUT or (path.exists() and not path.is_file() and not path.is_dir())


def check_output_file(output: str | Path | None, *inputs: str | Path | None) -> None:
    """Raise an error if no file can be written at `output`, before the work whose result it is to hold.

    That is a folder, a place below a file, no name at all, or one of the `inputs` (see `check_not_input`).
    """
    if output is None or is_stream(Path(output)):
        return
    final = Path(os.path.realpath(output))
    below = next((folder for folder in final.parents if folder.exists()), final.parent)
    if not str(output):
        given = "no name"
    elif final.is_dir() or str(output).endswith(("/", os.sep)):
        given = f"{output}, which is a folder"
    elif not below.is_dir():
        given = f"{output}, but {below} is a file"
    else:
        return check_not_input(output, *inputs)
    raise OfframpError("a file to write", given, "name a file")


def check_not_input(output: str | Path | None, *inputs: str | Path | None) -> None:
    """Raise an error if writing `output` would destroy one of the files that are read, or a file in such a folder."""
    if output is None or str(output) == STANDARD_OUTPUT or is_stream(Path(output)):
        return
    for source in inputs:
        if source is not None and _covers(Path(output), Path(source)):
            given = f"{output}, which is read" if str(output) == str(source) else f"{output}, where {source} lies"
        elif source is not None and Path(output).is_file() and _covers(Path(source), Path(output)):
            given = f"{output}, a file of {source}, which is read"
        else:
            continue
        raise OfframpError("another place to write than to read", given, "write to another file or folder")


def _covers(outer: Path, inner: Path) -> bool:
    """Return whether the first path is the second or a folder that holds it, whatever names lead there."""
    try:
        return any(outer.samefile(place) for place in (inner, *inner.resolve().parents) if place.exists())
    except OSError:  # the first does not exist yet
        return False


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
        if match and match["name"] == path.name and not is_running(int(match["pid"])):
            remove_path(other)


def is_running(pid: int) -> bool:
    """Return whether a process exists."""
    if os.name == "nt":  # there, signal 0 is a Ctrl-C and not a test
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # a process of another user
    return True


def user_cache_folder() -> Path:
    """Return where fetched or derived files are kept: $XDG_CACHE_HOME/offramp, else ~/.cache/offramp."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "offramp"


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, or to standard output if the path is `-`."""
    if str(path) == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
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
    except (OSError, ValueError, RecursionError) as error:
        raise OfframpError(f"to read {path}", f"a damaged file ({error})", "restore it or train again") from error
