"""Rows from files by their ending, from standard input (`-`), or from a data set of the `datasets` library.

A row is a plain dict with our column names (`text`, `text_a`, `text_b`, `tokens`, `tags`, `label`, `question` …).
Errors name the line or row and how to fix it, and come before any model is loaded.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offramp.data import datasets_hub as hub
from offramp.data import formats
from offramp.errors import OfframpError

Row = dict[str, Any]
Reader = Callable[[str], Iterator[Row]]

ENDINGS: Mapping[str, Reader] = {
    ".jsonl": formats.jsonl_rows,
    ".csv": formats.csv_rows,
    ".tsv": formats.tsv_rows,
    ".parquet": formats.parquet_rows,
    ".json": formats.squad_rows,
    ".txt": formats.text_rows,
}
WORD_COLUMNS = ("tokens", "tags")  # CSV and TSV have no lists: these hold words separated by spaces


def read_rows(source: str, *, columns: Mapping[str, str] | None = None, limit: int | None = None) -> list[Row]:
    """Return all rows of a source; see `stream_rows`."""
    return list(stream_rows(source, columns=columns, limit=limit))


def stream_rows(source: str, *, columns: Mapping[str, str] | None = None, limit: int | None = None) -> Iterator[Row]:
    """Yield rows one by one, in constant memory (except SQuAD JSON), so that `predict` can follow a pipe of any length.

    `columns` maps our name to the file's: `{"text": "sentence"}`. A missing file raises at the call, before iteration.
    """
    if limit is not None and limit < 1:
        raise OfframpError(f"read {limit} rows of {source}", f"limit {limit}", "give a limit of 1 or more")
    rows = _reader(source)(source)
    return itertools.islice(_renamed(rows, source, dict(columns or {})), limit)


def require_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], source: str) -> None:
    """Raise an error if a row lacks one of these columns or has null there.

    The error names the row, the columns found and the flag that renames a column.
    """
    for number, row in enumerate(rows, 1):
        for column in columns:
            if row.get(column) is None:
                raise _column_error(column, row, source, number)


def fingerprint(source: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return sixteen hex digits of the content of the rows, the same for every path and file format.

    Recipes keep it, and calibration uses it to notice that it is given the training rows. `source` is for the message.
    """
    digest = hashlib.sha256()
    for number, row in enumerate(rows, 1):
        try:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        except (TypeError, ValueError) as error:
            raise OfframpError(
                f"a fingerprint of {source}", f"row {number} cannot be written as JSON ({error})", "use plain values"
            ) from error
    return digest.hexdigest()[:16]


def _reader(source: str) -> Reader:
    """Return the reader for a source; raise an error if it does not exist or cannot be read."""
    if source == "-":
        return formats.stdin_rows
    path = Path(source)
    reader = ENDINGS.get(Path(source.removesuffix(".gz")).suffix.lower())
    if path.is_dir():
        raise OfframpError(
            f"read {source}", "that is a folder, not a file", f"name a file in it: {_readable_files(path)}"
        )
    if path.exists():
        return reader or _unknown_ending
    if reader is None and hub.looks_like_name(source):
        return hub.dataset_rows
    raise _missing_file(path)


def _renamed(rows: Iterator[Row], source: str, columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield rows under our column names; an empty source is an error, whatever its format."""
    our_name = {column: name for name, column in columns.items()}  # column of the file → our name
    splits_words = source.lower().removesuffix(".gz").endswith((".csv", ".tsv"))
    number = 0
    for number, row in enumerate(rows, 1):
        absent = [column for column in our_name if column not in row]
        if absent:
            raise _column_error(absent[0], row, source, number, our_name[absent[0]])
        renamed = {name: value for name, value in row.items() if name not in our_name} if columns else row
        renamed.update({name: row[column] for name, column in columns.items()})
        if splits_words:
            renamed.update({name: renamed[name].split() for name in WORD_COLUMNS if name in renamed})
        yield renamed
    if number == 0:
        raise OfframpError(f"read {source}", "it holds no rows", "give a file with at least one row")


def _column_error(column: str, row: Mapping[str, Any], source: str, number: int, our_name: str = "") -> OfframpError:
    """Return the error for a column that a row lacks or has as null; `our_name` if a flag named the column."""
    found = ", ".join(row) or "none"
    state = "is null" if column in row else "is missing"
    near = difflib.get_close_matches(column, [str(name) for name in row if name != column], n=1, cutoff=0.5)
    other = near[0] if near else "NAME"
    return OfframpError(
        asked=f"the column {column!r} of {source}",
        given=f"row {number}, where {column!r} {state}; columns found: {found}",
        fix=f"fill the column in, or name the one to use instead: --column {our_name or column}={other}",
    )


def _missing_file(path: Path) -> OfframpError:
    """Return the error for a file that does not exist, with names close to it."""
    folder = path.parent
    if not folder.is_dir():
        return OfframpError(f"read {path}", f"there is no folder {folder}", "check the path")
    names = [entry.name for entry in folder.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    fix = "did you mean " + " or ".join(str(folder / name) for name in near) + "?" if near else "check the path"
    return OfframpError(f"read {path}", "there is no such file", fix)


def _unknown_ending(source: str) -> Iterator[Row]:
    raise OfframpError(
        asked=f"read {source}",
        given="a file whose ending belongs to no known format",
        fix=f"rename it to one of {', '.join(ENDINGS)} (each may be followed by .gz)",
    )


def _readable_files(folder: Path) -> str:
    """Return a few readable files of a folder, for the message."""
    names = sorted(p.name for p in folder.iterdir() if Path(p.name.removesuffix(".gz")).suffix.lower() in ENDINGS)
    return ", ".join(names[:5]) or f"one ending in {', '.join(ENDINGS)}"
