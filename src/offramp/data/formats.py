"""One generator of raw rows per file format; every error names the line.

Lines are split on the byte \\n only: U+2028 and similar characters are legal inside JSON strings.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from offramp.errors import OfframpError, missing_package

Row = dict[str, Any]
Line = tuple[int, str]  # number from 1, text with its line end
LONGEST_FIELD = 10_000_000  # characters; Python's own limit of 131,072 is shorter than a long document


def jsonl_rows(source: str) -> Iterator[Row]:
    """Yield one row per JSON object, one object a line; blank lines are skipped."""
    return _objects(source, _lines(source))


def text_rows(source: str) -> Iterator[Row]:
    """Yield one text a line; an empty line stays a row, so that the task can refuse it with its number."""
    return _texts(_lines(source))


def stdin_rows(source: str) -> Iterator[Row]:
    """Yield rows of standard input: JSON lines if the first non-blank line starts with a brace, else plain lines."""
    lines = _lines(source)
    head: list[Line] = []
    for line in lines:
        head.append(line)
        if line[1].strip():
            break
    is_json = bool(head) and head[-1][1].lstrip().startswith("{")
    all_lines = itertools.chain(head, lines)
    yield from _objects("stdin", all_lines) if is_json else _texts(all_lines)


def csv_rows(source: str) -> Iterator[Row]:
    """Yield comma-separated rows with a header line; quoted as in RFC 4180: fields may hold commas and line ends."""
    return _delimited(source, csv.reader(_only_text(source), strict=True))


def tsv_rows(source: str) -> Iterator[Row]:
    """Yield tab-separated rows with a header line.

    Published files either never quote (GLUE, where sentences begin with a lone quote) or quote as CSV does. So tabs and
    line ends always separate, and quotes are removed only from fields that are quoted properly.
    """
    reader = csv.reader(_only_text(source), delimiter="\t", quoting=csv.QUOTE_NONE)
    return ({name: _unquoted(value) for name, value in row.items()} for row in _delimited(source, reader))


def parquet_rows(source: str) -> Iterator[Row]:
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
            for batch in content.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
        except (ArrowException, ValueError) as error:
            raise _damaged(source, error) from error


def squad_rows(source: str) -> Iterator[Row]:
    """Yield one row per question of SQuAD JSON (1.1 and 2.0); a JSON list of objects is taken as rows."""
    text = "".join(_only_text(source))
    if not text.strip():
        return
    content = _parse(text, source, 1)
    if isinstance(content, list) and all(isinstance(row, dict) for row in content):
        yield from content
        return
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield _question(question, paragraph["context"])
    except (KeyError, TypeError) as error:
        raise OfframpError(
            f"read {source} as SQuAD JSON",
            f"something else: {type(error).__name__} at {error}",
            "expected data → paragraphs → context, qas → question, answers; one object a line belongs in a .jsonl file",
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


@contextlib.contextmanager
def _open(source: str) -> Iterator[IO[bytes]]:
    """Yield the bytes of a source, unzipped; failures while reading become errors. Standard input is left open."""
    if source == "-":
        yield sys.stdin.buffer
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
                raise OfframpError(
                    f"read {source} as UTF-8",
                    f"line {number} is not UTF-8: byte 0x{raw[error.start]:02x} at place {error.start + 1}",
                    "save the file as UTF-8 (for example: iconv -f latin1 -t utf-8)",
                ) from error
            yield number, line.removeprefix("\ufeff") if number == 1 else line


def _only_text(source: str) -> Iterator[str]:
    return (line for _, line in _lines(source))


def _texts(lines: Iterable[Line]) -> Iterator[Row]:
    return ({"text": line.rstrip("\r\n")} for _, line in lines)


def _objects(source: str, lines: Iterable[Line]) -> Iterator[Row]:
    for number, line in lines:
        if not line.strip():
            continue
        value = _parse(line.strip(), source, number)
        if not isinstance(value, dict):
            raise OfframpError(
                f"read {source} as JSON lines",
                f"line {number} holds a {type(value).__name__}, not an object",
                'write one object a line: {"text": "…", "label": …}',
            )
        yield value


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


def _delimited(source: str, reader: Any) -> Iterator[Row]:  # Any: the type of csv.reader has no public name
    """Yield rows under the names of the first line; a row with another number of fields is an error."""
    csv.field_size_limit(LONGEST_FIELD)
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) < len(header):
            raise OfframpError(f"read {source}", f"a header with a name twice: {', '.join(header)}", "rename one")
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                given = f"line {reader.line_num} has {len(fields)} fields, the header has {len(header)}"
                raise OfframpError(f"read {source}", given, "quote fields that hold the separator (CSV), or use .jsonl")
            yield dict(zip(header, fields, strict=True))
    except csv.Error as error:
        given = f"line {reader.line_num}: {error}"
        raise OfframpError(f"read {source}", given, "check the quotes on that line, or use .jsonl") from error


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
