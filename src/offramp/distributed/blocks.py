"""Input files, cut into blocks of rows that are answered and written as a unit.

Blocks depend on the files and on `block_rows` alone, so a job that is started again finds the same ones. A block of a
parquet file is a slice of a row group, a block of a text file a range of bytes that starts at a row.
"""

from __future__ import annotations

import codecs
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
SAMPLE_ROWS = 1000  # rows of jsonl files that decide which columns and types a parquet or csv output has
LARGEST_CACHED_GROUP = 256 << 20  # bytes of a parquet row group that stays in memory for its next slice


@dataclass(frozen=True)
class InputFile:
    """A file to answer; size and time of change tell whether it is still the same."""

    path: str
    size: int
    changed: int  # nanoseconds
    base: str = ""  # the address that led to it, if any: `path` lacks its host, its options and its escapes


@dataclass(frozen=True)
class Block:
    """Rows that are answered together and written as one output file."""

    number: int
    path: str
    rows: int
    start: int  # parquet: first row within the row group; text: first byte
    size: int = 0  # text: bytes
    group: int = 0  # parquet: the row group
    base: str = ""  # as that of its file; never stored, because an address may hold a password

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


def place_of(file: InputFile | Block) -> tuple[Any, str]:
    """Return the file system of a file, and the path within it."""
    if not file.base:
        return file_system(file.path)
    return file_system(file.base)[0], file.path.split("://", 1)[1]


def format_of(path: str) -> str:
    """Return the format of a file by its ending."""
    ending = path.rsplit(".", 1)[-1].lower()
    if ending not in FORMATS:
        raise OfframpError("input as .parquet, .jsonl or .csv", path, "convert it, or unpack it if it is compressed")
    return ending


def find_files(inputs: str | Path | Sequence[str | Path]) -> list[InputFile]:
    """Return the files that paths, folders and patterns name, sorted and each once; all must have one format."""
    listed = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    found: dict[str, InputFile] = {}
    for place in listed:
        for file in _expand(str(place)):
            other = found.setdefault(file.path, file)
            if other.base != file.base and place_of(other)[0] != place_of(file)[0]:
                given = f"{file.path} on two file systems"
                raise OfframpError("input files of one file system", given, "answer them one file system at a time")
    files = [found[path] for path in sorted(found)]
    if not files:
        raise OfframpError("files to answer", f"no file at {', '.join(map(str, listed))}", "check the path or pattern")
    formats = sorted({format_of(file.path) for file in files})
    if len(formats) > 1:
        raise OfframpError("input files of one format", " and ".join(formats), "answer them one format at a time")
    return files


def _expand(place: str) -> Iterator[InputFile]:
    """Yield the files of a path, of a folder, or of a pattern; of an address only the last part may be a pattern.

    Names that begin with an underscore or a dot are left out, unless a path is such a name itself.
    """
    pa, (system, path) = arrow(), file_system(place)
    scheme = place.split("://")[0] + "://" if "://" in place else ""
    named = system.get_file_info(path)
    if named.type == pa.fs.FileType.File:  # also one with brackets in its name
        yield InputFile(scheme + named.path, named.size, named.mtime_ns or 0, place if scheme else "")
        return
    if not scheme and glob.has_magic(path):
        infos = system.get_file_info(glob.glob(path, recursive=True))
    elif glob.has_magic(path):
        folder, _, pattern = path.rpartition("/")
        selected = system.get_file_info(pa.fs.FileSelector(folder, allow_not_found=True))
        infos = [info for info in selected if Path(info.base_name).match(pattern)]
    else:
        infos = system.get_file_info(pa.fs.FileSelector(path, allow_not_found=True))
        infos = [one for one in infos if one.extension.lower() in FORMATS]
    for info in infos:
        if info.type == pa.fs.FileType.File and not info.base_name.startswith((".", "_")):
            yield InputFile(scheme + info.path, info.size, info.mtime_ns or 0, place if scheme else "")


def plan_blocks(files: Sequence[InputFile], block_rows: int) -> list[Block]:
    """Return the blocks of all files in order; text files are read once for it."""
    if block_rows < 1:
        raise OfframpError("rows in a block", f"block_rows={block_rows}", "give a whole number, 1 or more")
    cut = _parquet_blocks if format_of(files[0].path) == "parquet" else _text_blocks
    pieces = [(file, piece) for file in files for piece in cut(file, block_rows)]
    return [Block(number, file.path, base=file.base, **piece) for number, (file, piece) in enumerate(pieces)]


def _parquet_blocks(file: InputFile, block_rows: int) -> Iterator[dict[str, int]]:
    metadata = open_parquet(file).metadata
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        for start in range(0, rows, block_rows):
            yield {"rows": min(block_rows, rows - start), "start": start, "group": group}


def _text_blocks(file: InputFile, block_rows: int) -> Iterator[dict[str, int]]:
    """Yield ranges of bytes with `block_rows` rows each; a line end inside quotes of CSV ends no row."""
    is_csv = format_of(file.path) == "csv"
    rows, start, place, quoted, in_header = 0, 0, 0, False, is_csv
    for line in _lines(file):
        quoted = is_csv and ends_in_quotes(line.removeprefix(codecs.BOM_UTF8) if place == 0 else line, quoted)
        place += len(line)
        if quoted:
            continue
        if in_header:
            start, in_header = place, False
            continue
        rows += bool(line.strip(b"\r\n") if is_csv else line.strip())
        if rows == block_rows:
            yield {"rows": rows, "start": start, "size": place - start}
            rows, start = 0, place
    if rows or quoted:  # a quote that is never closed: the rest of the file is one row
        yield {"rows": rows + quoted, "start": start, "size": place - start}


def ends_in_quotes(line: bytes, quoted: bool) -> bool:
    """Return whether a line of CSV ends within quotes; `quoted`: whether it begins there.

    As the csv module reads it when strict: quotes count at the start of a field only, and one that is followed by
    something else than a separator spoils its row, which then ends with the line.
    """
    place = 0 if quoted else _opening_quote(line, 0)
    while place >= 0:
        place = line.find(b'"', place)
        if place < 0:
            return True
        if line[place + 1 : place + 2] == b'"':  # two of them stand for one
            place += 2
        elif line[place + 1 : place + 2] == b",":
            place = _opening_quote(line, place + 2)
        else:
            return False
    return False


def _opening_quote(line: bytes, start: int) -> int:
    """Return the place behind the next quote that opens a field, -1 if there is none; a field begins at `start`."""
    if line[start : start + 1] == b'"':
        return start + 1
    place = line.find(b',"', start)
    return place + 2 if place >= 0 else -1


def _lines(file: InputFile | Block) -> Iterator[bytes]:
    system, inner = place_of(file)
    with system.open_input_stream(inner, buffer_size=1 << 20) as stream:
        yield from io.BufferedReader(stream, 1 << 20)


def open_parquet(file: InputFile | Block) -> Any:
    """Return an opened parquet file; a damaged one raises an error that names it."""
    pa, (system, inner) = arrow(), place_of(file)
    try:
        return pa.parquet.ParquetFile(system.open_input_file(inner))
    except (pa.ArrowException, OSError) as error:
        given = f"it cannot be read: {error}"
        raise OfframpError(f"to read {file.path}", given, "check that it is complete") from error


def csv_header(file: InputFile | Block) -> list[str]:
    """Return the column names of a CSV file."""
    first, quoted = b"", False
    for line in _lines(file):
        quoted = ends_in_quotes(line if first else line.removeprefix(codecs.BOM_UTF8), quoted)
        first += line
        if not quoted:
            break
    text = first.decode("utf-8-sig", errors="replace")
    try:
        names = [name.strip() for name in next(csv.reader(io.StringIO(text, newline=""), strict=True), [])]
    except csv.Error as error:
        raise OfframpError(f"the header of {file.path}", f"{error}: {text[:80]!r}", "check its quotes") from error
    if not names or len(set(names)) < len(names):
        raise OfframpError(f"the header of {file.path}", ", ".join(names) or "none", "name every column, each once")
    return names


class BlockReader:
    """Reads blocks; the last parquet row group stays in memory, because its next slice is likely to follow."""

    def __init__(self) -> None:
        self.group: tuple[str, int, Any] | None = None

    def read(self, block: Block) -> BlockRows:
        """Return the rows of a block; rows that cannot be read have an error."""
        kind = format_of(block.path)
        if kind == "parquet":
            table = self._group(block).slice(block.start, block.rows)
            return BlockRows(table.to_pylist(), [""] * table.num_rows, table)
        system, path = place_of(block)
        with system.open_input_file(path) as file:
            file.seek(block.start)
            content = file.read(block.size)
        return parse_csv(content, csv_header(block)) if kind == "csv" else parse_jsonl(content)

    def _group(self, block: Block) -> Any:
        if self.group is not None and self.group[:2] == (block.path, block.group):
            return self.group[2]
        self.group = None
        table = open_parquet(block).read_row_group(block.group)
        if table.nbytes <= LARGEST_CACHED_GROUP:
            self.group = (block.path, block.group, table)
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
    lines = list(io.StringIO(content.decode("utf-8", errors="replace"), newline=""))
    reader, begin = csv.reader(iter(lines), strict=True), 0
    while True:
        fields: list[str] = []
        error = ""
        try:
            fields = next(reader)
        except StopIteration:
            return block
        except csv.Error as problem:
            error = f"{problem}: {''.join(lines[begin : reader.line_num])[:80]!r}; check the quotes"
        begin = reader.line_num
        if not fields and not error:
            continue
        values = [*fields[: len(header)], *[None] * (len(header) - len(fields))]
        if not error and len(fields) != len(header):
            error = f"{len(fields)} fields, the header has {len(header)}"
        if not error and any("\ufffd" in field for field in fields) and b"\xef\xbf\xbd" not in content:
            error = "not UTF-8"
        block.rows.append(dict(zip(header, values, strict=True)))
        block.errors.append(error)


def input_schema(files: Sequence[InputFile]) -> Any:
    """Return the pyarrow schema of the rows: of parquet its own, of CSV strings, of jsonl that of the first rows."""
    pa, kind, first = arrow(), format_of(files[0].path), files[0]
    if kind == "parquet":
        schema = open_parquet(first).schema_arrow
        for file in files[1:]:
            if not open_parquet(file).schema_arrow.equals(schema):
                raise OfframpError(
                    f"files with the columns of {first.path}", file.path, "convert it, or answer it apart"
                )
        return schema
    if kind == "csv":
        header = csv_header(first)
        for file in files[1:]:
            if csv_header(file) != header:
                raise OfframpError(
                    f"files with the columns of {first.path}", file.path, "convert it, or answer it apart"
                )
        return pa.schema([(name, pa.string()) for name in header])
    return _jsonl_schema(files)


def _jsonl_schema(files: Sequence[InputFile]) -> Any:
    """Return the columns of the first rows, in whatever file they are: Spark writes a first one that is empty.

    A column whose values have several types is None's type: null.
    """
    pa = arrow()
    sample: list[dict[str, Any]] = []
    for line in (line for file in files for line in _lines(file)):
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
