"""Rows from anywhere: files by their ending, stdin as `-`, or a name of the `datasets` library.

A row is a plain dict with our column names (`text`, `text_a`, `text_b`, `tokens`, `tags`, `label`, `question` …).
Bad input is reported with the line or row number and the way out, before any model is loaded.
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
    """All rows of a source at once; see `stream`."""
    return list(stream_rows(source, columns=columns, limit=limit))


def stream_rows(source: str, *, columns: Mapping[str, str] | None = None, limit: int | None = None) -> Iterator[Row]:
    """Rows one by one, in constant memory (except SQuAD JSON), so that `predict` can follow a pipe of any length.

    `columns` maps our name to the file's: `{"text": "sentence"}`. A missing file is reported here, before iteration.
    """
    if limit is not None and limit < 1:
        raise OfframpError(f"read {limit} rows of {source}", f"limit {limit}", "give a limit of 1 or more")
    rows = _reader(source)(source)
    return itertools.islice(_named(rows, source, dict(columns or {})), limit)


def require_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], source: str) -> None:
    """Every row has these columns, not null; the error names the row, the columns found and the flag to remap."""
    for number, row in enumerate(rows, 1):
        for column in columns:
            if row.get(column) is None:
                raise _lacks(column, row, source, number)


def fingerprint(source: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Sixteen hex digits of the content of the rows, the same wherever the file lies and however it is stored.

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
    """The reader for a source; raises for what does not exist or cannot be read."""
    if source == "-":
        return formats.stdin_rows
    path = Path(source)
    reader = ENDINGS.get(Path(source.removesuffix(".gz")).suffix.lower())
    if path.is_dir():
        raise OfframpError(f"read {source}", "that is a folder, not a file", f"name a file in it: {_inside(path)}")
    if path.exists():
        return reader or _unknown_ending
    if reader is None and hub.looks_like_name(source):
        return hub.dataset_rows
    raise _missing(path)


def _named(rows: Iterator[Row], source: str, columns: Mapping[str, str]) -> Iterator[Row]:
    """Rows under our column names; an empty source is an error, whatever its format."""
    theirs = {column: ours for ours, column in columns.items()}
    wordy = source.lower().removesuffix(".gz").endswith((".csv", ".tsv"))
    number = 0
    for number, row in enumerate(rows, 1):
        absent = [column for column in theirs if column not in row]
        if absent:
            raise _lacks(absent[0], row, source, number, ours=theirs[absent[0]])
        named = {name: value for name, value in row.items() if name not in theirs} if columns else row
        named.update({ours: row[column] for ours, column in columns.items()})
        if wordy:
            named.update({name: named[name].split() for name in WORD_COLUMNS if name in named})
        yield named
    if number == 0:
        raise OfframpError(f"read {source}", "it holds no rows", "give a file with at least one row")


def _lacks(column: str, row: Mapping[str, Any], source: str, number: int, ours: str = "") -> OfframpError:
    """The error for a column that a row does not have, or has as null; `ours` if a flag named it."""
    found = ", ".join(row) or "none"
    state = "is null" if column in row else "is missing"
    near = difflib.get_close_matches(column, [str(name) for name in row if name != column], n=1, cutoff=0.5)
    other = near[0] if near else "NAME"
    return OfframpError(
        asked=f"the column {column!r} of {source}",
        given=f"row {number}, where {column!r} {state}; columns found: {found}",
        fix=f"fill the column in, or say which one to use instead: --column {ours or column}={other}",
    )


def _missing(path: Path) -> OfframpError:
    """The error for a file that does not exist, with names close to it."""
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
        given="a file whose ending says nothing about its format",
        fix=f"rename it to one of {', '.join(ENDINGS)} (each may be followed by .gz)",
    )


def _inside(folder: Path) -> str:
    """A few readable files of a folder, for the message."""
    names = sorted(p.name for p in folder.iterdir() if Path(p.name.removesuffix(".gz")).suffix.lower() in ENDINGS)
    return ", ".join(names[:5]) or f"one ending in {', '.join(ENDINGS)}"
