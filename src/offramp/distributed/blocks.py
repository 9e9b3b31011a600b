"""Input files, cut into blocks of rows that are answered and written as a unit.

Blocks depend on the files and on `block_rows` alone, so a job that is started again finds the same ones. A block of a
parquet file is a slice of a row group, a block of a text file a range of bytes that starts at a row.
"""

from __future__ import annotations

import csv
import glob
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offramp.data.formats import LONGEST_FIELD
from offramp.errors import OfframpError, missing_package

FORMATS = ("parquet", "jsonl", "csv")
SAMPLE_ROWS = 1000  # rows of a jsonl file that decide which columns and types a parquet or csv output has
LARGEST_CACHED_GROUP = 256 << 20  # bytes of a parquet row group that stays in memory for its next slice


@dataclass(frozen=True)
class InputFile:
    """A file to answer; size and time of change tell whether it is still the same."""

    path: str
    size: int
    changed: int  # nanoseconds


@dataclass(frozen=True)
class Block:
    """Rows that are answered together and written as one output file."""

    number: int
    path: str
    rows: int
    start: int  # parquet: first row within the row group; text: first byte
    size: int = 0  # text: bytes
    group: int = 0  # parquet: the row group

    @property
    def work(self) -> int:
        """A measure of its work for comparing blocks of one job: bytes of text, or rows of parquet."""
        return self.size or self.rows

    def to_json(self) -> str:
        """Return the block as text, which is how it travels through Ray."""
        return json.dumps(asdict(self))


@dataclass
class BlockRows:
    """The rows of a block: as they were, as dicts, and the reason why one cannot be read ("" if it can)."""

    rows: list[dict[str, Any]]
    errors: list[str]
    table: Any = None  # pyarrow.Table of a parquet block


def arrow() -> Any:
    """Return pyarrow with the modules used here, or name the extra that brings it."""
    try:
        import pyarrow
        import pyarrow.fs
        import pyarrow.parquet
    except ImportError as error:
        raise missing_package("ray", "pyarrow") from error
    return pyarrow


def file_system(place: str | Path) -> tuple[Any, str]:
    """Return the file system of a path or URI, and the path within it; local paths become absolute."""
    pa, text = arrow(), str(place)
    if "://" not in text:
        return pa.fs.LocalFileSystem(), str(Path(text).absolute())
    try:
        system, path = pa.fs.FileSystem.from_uri(text)
    except (pa.ArrowException, OSError) as error:
        raise OfframpError("a place that pyarrow can open", f"{text}: {error}", "check the address") from error
    return system, path


def format_of(path: str) -> str:
    """Return the format of a file by its ending."""
    ending = path.rsplit(".", 1)[-1].lower()
    if ending not in FORMATS:
        raise OfframpError("input as .parquet, .jsonl or .csv", path, "convert it, or unpack it if it is compressed")
    return ending


def find_files(inputs: str | Path | Sequence[str | Path]) -> list[InputFile]:
    """Return the files that paths, folders and patterns name, sorted and each once; all must have one format."""
    listed = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    found = {file.path: file for place in listed for file in _expand(str(place))}
    files = [found[path] for path in sorted(found)]
    if not files:
        raise OfframpError("files to answer", f"no file at {', '.join(map(str, listed))}", "check the path or pattern")
    formats = sorted({format_of(file.path) for file in files})
    if len(formats) > 1:
        raise OfframpError("input files of one format", " and ".join(formats), "answer them one format at a time")
    return files


def _expand(place: str) -> Iterator[InputFile]:
    """Yield the files of a path, of a folder, or of a pattern; of an address only the last part may be a pattern."""
    pa, (system, path) = arrow(), file_system(place)
    scheme = place.split("://")[0] + "://" if "://" in place else ""
    if not scheme and glob.has_magic(path):
        infos = system.get_file_info(glob.glob(path, recursive=True))
    elif glob.has_magic(path):
        folder, _, pattern = path.rpartition("/")
        selected = system.get_file_info(pa.fs.FileSelector(folder, allow_not_found=True))
        infos = [info for info in selected if Path(info.base_name).match(pattern)]
    else:
        info = system.get_file_info(path)
        is_folder = info.type == pa.fs.FileType.Directory
        infos = system.get_file_info(pa.fs.FileSelector(path)) if is_folder else [info]
        infos = [one for one in infos if not is_folder or one.extension.lower() in FORMATS]
    for info in infos:
        if info.type == pa.fs.FileType.File and not info.base_name.startswith((".", "_")):
            yield InputFile(scheme + info.path, info.size, info.mtime_ns or 0)


def plan_blocks(files: Sequence[InputFile], block_rows: int) -> list[Block]:
    """Return the blocks of all files in order; text files are read once for it."""
    if block_rows < 1:
        raise OfframpError("rows in a block", f"block_rows={block_rows}", "give a whole number, 1 or more")
    cut = _parquet_blocks if format_of(files[0].path) == "parquet" else _text_blocks
    pieces = [piece for file in files for piece in cut(file.path, block_rows)]
    return [Block(number, **piece) for number, piece in enumerate(pieces)]


def _parquet_blocks(path: str, block_rows: int) -> Iterator[dict[str, Any]]:
    metadata = open_parquet(path).metadata
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        for start in range(0, rows, block_rows):
            yield {"path": path, "rows": min(block_rows, rows - start), "start": start, "group": group}


def _text_blocks(path: str, block_rows: int) -> Iterator[dict[str, Any]]:
    """Yield ranges of bytes with `block_rows` rows each; a line end inside quotes of CSV ends no row."""
    is_csv, rows, start, place, quoted = format_of(path) == "csv", 0, 0, 0, False
    for line in _lines(path):
        place += len(line)
        quoted ^= is_csv and line.count(b'"') % 2 == 1
        if quoted:
            continue
        if is_csv and start == 0 and rows == 0 and place == len(line):  # the header
            start = place
            continue
        rows += bool(line.strip())
        if rows == block_rows:
            yield {"path": path, "rows": rows, "start": start, "size": place - start}
            rows, start = 0, place
    if rows or quoted:  # a quote that is never closed: the rest of the file is one row
        yield {"path": path, "rows": rows + quoted, "start": start, "size": place - start}


def _lines(path: str) -> Iterator[bytes]:
    system, inner = file_system(path)
    with system.open_input_stream(inner, buffer_size=1 << 20) as stream:
        yield from io.BufferedReader(stream, 1 << 20)


def open_parquet(path: str) -> Any:
    """Return an opened parquet file; a damaged one raises an error that names it."""
    pa, (system, inner) = arrow(), file_system(path)
    try:
        return pa.parquet.ParquetFile(system.open_input_file(inner))
    except (pa.ArrowException, OSError) as error:
        raise OfframpError(f"to read {path}", f"it cannot be read: {error}", "check that it is complete") from error


def csv_header(path: str) -> list[str]:
    """Return the column names of a CSV file."""
    first: list[bytes] = []
    for line in _lines(path):
        first.append(line)
        if sum(one.count(b'"') for one in first) % 2 == 0:
            break
    text = b"".join(first).decode("utf-8-sig", errors="replace")
    names = [name.strip() for name in next(csv.reader(io.StringIO(text, newline="")), [])]
    if not names or len(set(names)) < len(names):
        raise OfframpError(f"the header of {path}", ", ".join(names) or "none", "name every column, each once")
    return names


class BlockReader:
    """Reads blocks; the last parquet row group stays in memory, because its next slice is likely to follow."""

    def __init__(self) -> None:
        self.group: tuple[str, int, Any] | None = None

    def read(self, block: Block) -> BlockRows:
        """Return the rows of a block; rows that cannot be read have an error."""
        kind = format_of(block.path)
        if kind == "parquet":
            table = self._group(block.path, block.group).slice(block.start, block.rows)
            return BlockRows(table.to_pylist(), [""] * table.num_rows, table)
        system, path = file_system(block.path)
        with system.open_input_file(path) as file:
            file.seek(block.start)
            content = file.read(block.size)
        return parse_csv(content, csv_header(block.path)) if kind == "csv" else parse_jsonl(content)

    def _group(self, path: str, group: int) -> Any:
        if self.group is not None and self.group[:2] == (path, group):
            return self.group[2]
        self.group = None
        table = open_parquet(path).read_row_group(group)
        if table.nbytes <= LARGEST_CACHED_GROUP:
            self.group = (path, group, table)
        return table


def parse_jsonl(content: bytes) -> BlockRows:
    """Return one row a line; a line that is no JSON object is an empty row with an error."""
    block = BlockRows([], [])
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        row: Any = {}
        error = ""
        try:
            row = json.loads(line.decode("utf-8-sig"))
            if b"\\u" in line:
                json.dumps(row, ensure_ascii=False).encode()  # lone surrogates: no tokenizer takes them
        except (ValueError, RecursionError) as problem:
            error = f"not a JSON object ({problem}): {line[:80].decode('utf-8', errors='replace')}"
        if not error and not isinstance(row, dict):
            error = f"not a JSON object: {line[:80].decode('utf-8', errors='replace')}"
        block.rows.append(row if isinstance(row, dict) and not error else {})
        block.errors.append(error)
    return block


def parse_csv(content: bytes, header: Sequence[str]) -> BlockRows:
    """Return the rows of CSV without its header line; a row with another number of fields keeps those that it has."""
    csv.field_size_limit(LONGEST_FIELD)
    block = BlockRows([], [])
    text = content.decode("utf-8", errors="replace")
    for fields in csv.reader(io.StringIO(text, newline="")):
        if not fields:
            continue
        error = "" if len(fields) == len(header) else f"{len(fields)} fields, the header has {len(header)}"
        values = [*fields[: len(header)], *[None] * (len(header) - len(fields))]
        if not error and any("\ufffd" in field for field in fields) and b"\xef\xbf\xbd" not in content:
            error = "not UTF-8"
        block.rows.append(dict(zip(header, values, strict=True)))
        block.errors.append(error)
    return block


def input_schema(files: Sequence[InputFile]) -> Any:
    """Return the pyarrow schema of the rows: of parquet its own, of CSV strings, of jsonl that of the first rows."""
    pa, kind, first = arrow(), format_of(files[0].path), files[0].path
    if kind == "parquet":
        schema = open_parquet(first).schema_arrow
        for file in files[1:]:
            if not open_parquet(file.path).schema_arrow.equals(schema):
                raise OfframpError(f"files with the columns of {first}", file.path, "convert it, or answer it apart")
        return schema
    if kind == "csv":
        header = csv_header(first)
        for file in files[1:]:
            if csv_header(file.path) != header:
                raise OfframpError(f"files with the columns of {first}", file.path, "convert it, or answer it apart")
        return pa.schema([(name, pa.string()) for name in header])
    return _jsonl_schema(first)


def _jsonl_schema(path: str) -> Any:
    """Return the columns of the first rows; a column whose values have several types is None's type: null."""
    pa = arrow()
    sample: list[dict[str, Any]] = []
    for line in _lines(path):
        sample += [row for row in parse_jsonl(line).rows if row]
        if len(sample) >= SAMPLE_ROWS:
            break
    names = list(dict.fromkeys(name for row in sample for name in row))
    fields = []
    for name in names:
        try:
            kind = pa.array([row.get(name) for row in sample]).type
        except (pa.ArrowException, OverflowError):
            kind = pa.null()  # mixed: refused where a type is needed
        fields.append(pa.field(name, kind))
    return pa.schema(fields)
