"""One generator of raw rows per file format, each with its line; a line that is no row gives the error instead.

A caller that must have every row raises the error; one that answers what it can goes on behind it.

Lines are split on the byte \\n only: U+2028 and similar characters are legal inside JSON strings.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import json
import os
import select
import shutil
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import IO, Any

from offramp.errors import OfframpError, missing_package

Row = dict[str, Any]
Line = tuple[int, str | OfframpError]  # number from 1, text with its line end, or why it is none
NumberedRow = tuple[int, Row | OfframpError]  # number of its line from 1 (of its row, where there are no lines)
LINES = "one object a line belongs in a .jsonl file"
LONGEST_FIELD = 10_000_000  # characters; Python's own limit of 131,072 is shorter than a long document


def jsonl_rows(source: str) -> Iterator[NumberedRow]:
    """Yield one row per JSON object, one object a line; blank lines are skipped."""
    return _objects(source, _lines(source))


def text_rows(source: str) -> Iterator[NumberedRow]:
    """Yield one text a line; an empty line stays a row, so that the task can refuse it with its number."""
    return _texts(_lines(source))


def stdin_rows(source: str) -> Iterator[NumberedRow]:
    """Yield rows of standard input: JSON lines if the first non-blank line starts with a brace, else plain lines."""
    lines = _lines(source)
    head: list[Line] = []
    for line in lines:
        head.append(line)
        if isinstance(line[1], str) and line[1].strip():
            break
    last = head[-1][1] if head else ""
    is_json = isinstance(last, str) and last.lstrip().startswith("{")
    all_lines = itertools.chain(head, lines)
    yield from _objects("stdin", all_lines) if is_json else _texts(all_lines)


def csv_rows(source: str) -> Iterator[NumberedRow]:
    """Yield comma-separated rows with a header line; quoted as in RFC 4180: fields may hold commas and line ends."""
    lines = _TextLines(source)
    return _delimited(source, lines, csv.reader(lines, strict=True))


def tsv_rows(source: str) -> Iterator[NumberedRow]:
    """Yield tab-separated rows with a header line.

    Published files either never quote (GLUE, where sentences begin with a lone quote) or quote as CSV does. So tabs and
    line ends always separate, and quotes are removed only from fields that are quoted properly.
    """
    lines = _TextLines(source)
    reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    for number, row in _delimited(source, lines, reader):
        yield number, {n: _unquoted(value) for n, value in row.items()} if isinstance(row, dict) else row


def parquet_rows(source: str) -> Iterator[NumberedRow]:
    """Yield rows of Apache Parquet, read in batches (needs the extra `data`)."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise missing_package("data", "pyarrow") from error
    with _open(source) as file, tempfile.TemporaryFile() as seekable:
        if source.lower().endswith(".gz"):
            shutil.copyfileobj(file, seekable)
        try:
            content = ParquetFile(seekable if source.lower().endswith(".gz") else file)
            batches = content.iter_batches(batch_size=1024)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
        except (ArrowException, ValueError) as error:
            raise _damaged(source, error) from error


def squad_rows(source: str) -> Iterator[NumberedRow]:
    """Yield one row per question of SQuAD JSON (1.1 and 2.0); a JSON list of objects is taken as rows."""
    return enumerate(_questions(source), 1)


def _questions(source: str) -> Iterator[Row]:
    text = "".join(_TextLines(source))
    if not text.strip():
        return
    try:
        content = _parse(text, source, 1)
    except OfframpError as error:
        raise OfframpError(error.asked, error.given, f"{error.fix}; {LINES}") from error
    if isinstance(content, list) and all(isinstance(row, dict) for row in content):
        yield from content
        return
    place = "its top level"
    try:
        for a, article in enumerate(content["data"]):
            place = f"data[{a}]"
            for p, paragraph in enumerate(article["paragraphs"]):
                place = f"data[{a}].paragraphs[{p}]"
                for q, question in enumerate(paragraph["qas"]):
                    place = f"data[{a}].paragraphs[{p}].qas[{q}]"
                    yield _question(question, paragraph["context"])
    except (KeyError, TypeError, AttributeError) as error:
        raise OfframpError(
            f"read {source} as SQuAD JSON",
            f"something else at {place}: {type(error).__name__}, {error}",
            f"expected data → paragraphs → context, qas → question, answers; {LINES}",
        ) from error


def _question(question: Row, context: str) -> Row:
    """Return one row; `answers` is left out if the file has none, so that evaluation on it raises an error."""
    row: Row = {"id": question.get("id"), "question": question["question"], "context": context}
    if question.get("is_impossible"):
        row["answers"] = {"text": [], "answer_start": []}
    elif "answers" in question:
        answers = question["answers"]
        row["answers"] = {key: [answer[key] for answer in answers] for key in ("text", "answer_start")}
    return row


class StandardInput:
    """Lines of standard input as they arrive; it knows whether another one is there already."""

    def __init__(self) -> None:
        self._complete: deque[bytes] = deque()
        self._file: int | None = None  # None: standard input was replaced by something that is no file

    def opened(self) -> Any:
        """Return the bytes of standard input, line by line, from where earlier reading stopped."""
        if sys.stdin is None:
            raise OfframpError("rows on standard input", "a standard input that is closed", "pipe rows in, or a file")
        try:
            self._file = sys.stdin.buffer.fileno()
        except OSError:
            self._file = None
        return sys.stdin.buffer if self._file is None else self._lines(self._file)

    def _lines(self, file: int) -> Iterator[bytes]:
        unfinished = b""
        while block := os.read(file, 1 << 16):
            *lines, unfinished = (unfinished + block).split(b"\n")
            self._complete.extend(line + b"\n" for line in lines)
            while self._complete:
                yield self._complete.popleft()
        if unfinished:
            yield unfinished

    def ready(self) -> bool:
        """Return whether more can be read without waiting for the writer."""
        if self._complete or self._file is None or os.name == "nt":  # there, select works on sockets only
            return True
        return bool(select.select([self._file], [], [], 0)[0])


STANDARD_INPUT = StandardInput()


@contextlib.contextmanager
def _open(source: str) -> Iterator[IO[bytes]]:
    """Yield the bytes of a source, unzipped; failures while reading become errors. Standard input is left open."""
    if source == "-":
        yield STANDARD_INPUT.opened()
        return
    opener: Any = gzip.open if source.lower().endswith(".gz") else open
    try:
        with opener(source, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(source, error) from error


def _lines(source: str) -> Iterator[Line]:
    """Yield numbered UTF-8 lines, without a byte order mark."""
    with _open(source) as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                given = f"line {number} is not UTF-8: byte 0x{raw[error.start]:02x} at place {error.start + 1}"
                fix = "save the file as UTF-8 (for example: iconv -f latin1 -t utf-8)"
                yield number, OfframpError(f"read {source} as UTF-8", given, fix)
                continue
            yield number, line.removeprefix("\ufeff") if number == 1 else line


class _TextLines:
    """The lines of a source as texts; one that is no text raises its error, and the next call goes on behind it."""

    def __init__(self, source: str) -> None:
        self.lines, self.number = _lines(source), 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.number, line = next(self.lines)
        if isinstance(line, OfframpError):
            raise line
        return line


def _texts(lines: Iterable[Line]) -> Iterator[NumberedRow]:
    for number, line in lines:
        yield number, line if isinstance(line, OfframpError) else {"text": line.rstrip("\r\n")}


def _objects(source: str, lines: Iterable[Line]) -> Iterator[NumberedRow]:
    for number, line in lines:
        if isinstance(line, OfframpError):
            yield number, line
        elif line.strip():
            try:
                yield number, _object(line.strip(), source, number)
            except OfframpError as error:
                yield number, error


def _object(line: str, source: str, number: int) -> Row:
    value = _parse(line, source, number)
    if not isinstance(value, dict):
        given = f"line {number} holds a {type(value).__name__}, not an object"
        fix = 'write one object a line: {"text": "…", "label": …}'
        raise OfframpError(f"read {source} as JSON lines", given, fix)
    return value


def _parse(text: str, source: str, number: int) -> Any:
    """Return parsed JSON, or raise an error with the line; lone surrogates are refused: no tokenizer takes them."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        line, reason = number + error.lineno - 1, f"{error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        line, reason = number, str(error)
    raise OfframpError(f"read {source} as JSON", f"line {line} is not valid JSON: {reason}", "correct that line")


def _delimited(
    source: str, lines: _TextLines, reader: Any
) -> Iterator[NumberedRow]:  # Any: the type of csv.reader has no public name
    """Yield rows under the names of the first line; a row with another number of fields is an error."""
    csv.field_size_limit(LONGEST_FIELD)
    header: list[str] | None = None
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except OfframpError as error:
            found: Row | OfframpError = error
        except csv.Error as error:
            given, fix = f"line {lines.number}: {error}", "check the quotes on that line, or use .jsonl"
            found = OfframpError(f"read {source}", given, fix)
        else:
            if header is None:
                header = _header(source, fields)
                continue
            if not fields:
                continue
            found = _fields(source, lines.number, header, fields)
        if header is None and isinstance(found, OfframpError):
            raise found  # without a header no later line is a row
        yield lines.number, found


def _header(source: str, fields: list[str]) -> list[str]:
    header = [name.strip() for name in fields]
    if len(set(header)) < len(header):
        raise OfframpError(f"read {source}", f"a header with a name twice: {', '.join(header)}", "rename one")
    return header


def _fields(source: str, number: int, header: list[str], fields: list[str]) -> Row | OfframpError:
    if len(fields) == len(header):
        return dict(zip(header, fields, strict=True))
    given = f"line {number} has {len(fields)} fields, the header has {len(header)}"
    return OfframpError(f"read {source}", given, "quote fields that hold the separator (CSV), or use .jsonl")


def _unquoted(value: str) -> str:
    inner = value[1:-1]
    proper = len(value) > 1 and value[0] == value[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if proper else value


def _damaged(source: str, error: Exception) -> OfframpError:
    return OfframpError(
        f"read {source}",
        f"it cannot be read: {error or type(error).__name__}",
        "check that it is complete, readable and really of that format; copy or download it again",
    )
