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
Reader = Callable[[str], Iterator[formats.NumberedRow]]

ENDINGS: Mapping[str, Reader] = {
    ".jsonl": formats.jsonl_rows,
    ".csv": formats.csv_rows,
    ".tsv": formats.tsv_rows,
    ".parquet": formats.parquet_rows,
    ".json": formats.squad_rows,
    ".txt": formats.text_rows,
}
FORMATS = tuple(ending[1:] for ending in ENDINGS)  # what a format is called where an ending does not tell it
WORD_COLUMNS = ("tokens", "tags")  # CSV and TSV have no lists: these hold words separated by spaces
LABEL_COLUMN = "label"  # of CSV and TSV: spaces around it mean nothing, and an empty field is no label


class RenamedRow(Row):
    """A row under our column names that still knows the row of the file."""

    def __init__(self, row: Row, original: Row) -> None:
        super().__init__(row)
        self.original = original


def read_rows(
    source: str,
    *,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    remembered: Mapping[str, str] | None = None,
) -> list[Row]:
    """Return all rows of a source; see `stream_rows`."""
    return list(stream_rows(source, columns=columns, limit=limit, remembered=remembered))


def stream_rows(
    source: str,
    *,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    remembered: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Yield rows one by one, in constant memory (except SQuAD JSON); the first bad one raises its error.

    `columns` maps our name to the file's: `{"text": "sentence"}`. `remembered` does the same where a row has that
    column and lacks ours. A missing file raises at the call, before iteration.
    """
    if limit is not None and limit < 1:
        raise OfframpError(f"read {limit} rows of {source}", f"limit {limit}", "give a limit of 1 or more")
    return itertools.islice(_only_rows(stream_numbered_rows(source, columns=columns, remembered=remembered)), limit)


def stream_numbered_rows(
    source: str,
    *,
    columns: Mapping[str, str] | None = None,
    remembered: Mapping[str, str] | None = None,
    format: str | None = None,
) -> Iterator[formats.NumberedRow]:
    """Yield the line and the row, or the error of a bad one: `predict` follows a pipe of any length with it.

    A row in which a column has another name than in the file is a `RenamedRow`.
    `format` is one of `FORMATS`, for sources whose ending does not tell it.
    """
    rows = _reader(source, format)(source)
    kind = format or Path(source.lower().removesuffix(".gz")).suffix[1:]
    return _renamed(rows, source, dict(columns or {}), dict(remembered or {}), kind in ("csv", "tsv"))


def check_source(source: str) -> None:
    """Raise an error if a source is a file that does not exist; the file is not read."""
    _reader(source)


def more_is_ready(source: str) -> bool:
    """Return whether another row can be read without waiting: always of files, of a pipe if it is there already."""
    return source != "-" or formats.STANDARD_INPUT.ready()


def _only_rows(numbered: Iterator[formats.NumberedRow]) -> Iterator[Row]:
    for _, row in numbered:
        if isinstance(row, OfframpError):
            raise row
        yield dict(row) if isinstance(row, RenamedRow) else row  # kept in memory without the row of the file


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


def _reader(source: str, format: str | None = None) -> Reader:
    """Return the reader for a source; raise an error if it does not exist or cannot be read."""
    if format is not None and format not in FORMATS:
        raise OfframpError("a format of rows", f"--format {format}", f"use one of: {', '.join(FORMATS)}")
    chosen = ENDINGS.get(f".{format}")
    if source == "-":
        if format == "parquet":
            raise OfframpError("rows on standard input", "--format parquet", "give the file's name instead")
        return chosen or formats.stdin_rows
    path = Path(source)
    reader = chosen or ENDINGS.get(Path(source.removesuffix(".gz")).suffix.lower())
    if path.is_dir():
        raise OfframpError(
            f"read {source}", "that is a folder, not a file", f"name a file in it: {_readable_files(path)}"
        )
    if path.exists():
        return reader or _unknown_ending
    if reader is None and hub.looks_like_name(source):
        return lambda name: enumerate(hub.dataset_rows(name), 1)
    raise _missing_file(path)


def _renamed(
    rows: Iterator[formats.NumberedRow],
    source: str,
    columns: Mapping[str, str],
    remembered: Mapping[str, str],
    delimited: bool,
) -> Iterator[formats.NumberedRow]:
    """Yield rows under our column names; an empty source is an error, whatever its format."""
    empty = True
    for number, row in rows:
        empty = False
        if not isinstance(row, OfframpError):
            known = {name: column for name, column in remembered.items() if column in row and name not in row}
            row = _rename(row, source, number, {**known, **columns})
        if delimited and not isinstance(row, OfframpError):
            _clean_delimited(row)
        yield number, row
    if empty:
        raise OfframpError(f"read {source}", "it holds no rows", "give a file with at least one row")


def _rename(row: Row, source: str, number: int, columns: Mapping[str, str]) -> Row | OfframpError:
    """Return a row under our column names, or the error of a column that it lacks."""
    if not columns:
        return row
    our_name = {column: name for name, column in columns.items()}  # column of the file → our name
    absent = [column for column in our_name if column not in row]
    if absent:
        return _column_error(absent[0], row, source, number, our_name[absent[0]])
    renamed = {name: value for name, value in row.items() if name not in our_name}
    return RenamedRow({**renamed, **{name: row[column] for name, column in columns.items()}}, row)


def _clean_delimited(row: Row) -> None:
    """Give a row of CSV or TSV its lists of words, and its label without spaces (None if it is empty)."""
    row.update({name: row[name].split() for name in WORD_COLUMNS if name in row})
    if LABEL_COLUMN in row:
        row[LABEL_COLUMN] = row[LABEL_COLUMN].strip() or None


def _column_error(column: str, row: Mapping[str, Any], source: str, number: int, our_name: str = "") -> OfframpError:
    """Return the error for a column that a row lacks or has as null; `our_name` if a flag named the column."""
    found = ", ".join(row) or "none"
    state = "is null or empty" if column in row else "is missing"
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


def _unknown_ending(source: str) -> Iterator[formats.NumberedRow]:
    raise OfframpError(
        asked=f"read {source}",
        given="a file whose ending belongs to no known format",
        fix=f"rename it to one of {', '.join(ENDINGS)} (each may be followed by .gz)",
    )


def _readable_files(folder: Path) -> str:
    """Return a few readable files of a folder, for the message."""
    names = sorted(p.name for p in folder.iterdir() if Path(p.name.removesuffix(".gz")).suffix.lower() in ENDINGS)
    return ", ".join(names[:5]) or f"one ending in {', '.join(ENDINGS)}"
