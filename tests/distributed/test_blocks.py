"""Blocks: every row of every file lies in exactly one, and damaged rows are rows with an error."""

from __future__ import annotations

import csv
import json
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.distributed import blocks
from offramp.distributed.blocks import BlockReader, ends_in_quotes, find_files, input_schema, plan_blocks
from offramp.distributed.manifest import OutputFolder, manifest_blocks
from offramp.errors import OfframpError

ROWS = [{"id": str(i), "text": f'a "quoted"\nline, {i}'} for i in range(23)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the file's ending; parquet in row groups of ten."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def read_all(place: Path, block_rows: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows and errors of all blocks."""
    reader = BlockReader()
    read = [reader.read(block) for block in plan_blocks(find_files(str(place)), block_rows)]
    return [row for block in read for row in block.rows], [error for block in read for error in block.errors]


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("block_rows", [1, 4, 10, 23, 100])
def test_blocks_hold_every_row_once_and_in_order(tmp_path: Path, ending: str, block_rows: int) -> None:
    write(tmp_path / f"a.{ending}", ROWS[:15])
    write(tmp_path / f"b.{ending}", ROWS[15:])
    rows, errors = read_all(tmp_path / f"*.{ending}", block_rows)
    assert rows == ROWS and not any(errors)
    planned = plan_blocks(find_files(tmp_path), block_rows)
    assert [block.number for block in planned] == list(range(len(planned)))
    assert sum(block.rows for block in planned) == len(ROWS) and max(block.rows for block in planned) <= block_rows


def test_damaged_lines_of_jsonl_are_rows_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "a"}\n\n{"text": \n[1]\n\xff\n{"text": "\\ud800"}\n{"text": "b"}')
    rows, errors = read_all(tmp_path / "in.jsonl", 2)
    assert [row.get("text") for row in rows] == ["a", None, None, None, None, "b"]
    assert [bool(error) for error in errors] == [False, True, True, True, True, False]


def test_damaged_rows_of_csv_keep_their_fields(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"id,text\n1,a\n2\n3,b,c\n4,d\n")
    rows, errors = read_all(tmp_path / "in.csv", 3)
    assert rows == [{"id": "1", "text": "a"}, {"id": "2", "text": None}, {"id": "3", "text": "b"},
                    {"id": "4", "text": "d"}]  # fmt: skip
    assert [bool(error) for error in errors] == [False, True, True, False]


@pytest.mark.parametrize("block_rows", [1, 2, 9])
def test_a_quote_that_is_never_closed_is_a_row_with_an_error(tmp_path: Path, block_rows: int) -> None:
    (tmp_path / "in.csv").write_bytes(b'id,text\n1,a\n2,"b\n3,c\n4,d\n')
    rows, errors = read_all(tmp_path / "in.csv", block_rows)
    assert rows == [{"id": "1", "text": "a"}, {"id": None, "text": None}]
    assert errors[0] == "" and "unexpected end of data" in errors[1] and '2,"b' in errors[1]


@pytest.mark.parametrize("block_rows", [1, 2, 3, 9])
def test_a_damaged_quote_spoils_its_own_row_only(tmp_path: Path, block_rows: int) -> None:
    lines = [b'1,"a"x', b'2,5" wide', b'x"3,"a\nb"', b"4,", b'" ""5""",e', b" ", b"6,f"]
    (tmp_path / "in.csv").write_bytes(b"id,text\n" + b"\n".join(lines))
    rows, errors = read_all(tmp_path / "in.csv", block_rows)
    assert [row["id"] for row in rows] == [None, "2", 'x"3', "4", ' "5"', " ", "6"]
    assert [row["text"] for row in rows] == [None, '5" wide', "a\nb", "", "e", None, "f"]
    assert [bool(error) for error in errors] == [True, False, False, False, False, True, False]


@given(st.lists(st.sampled_from([b'"', b'""', b",", b"a", b"\n", b"\r\n"]), max_size=30), st.integers(1, 3))
def test_any_csv_has_the_same_rows_in_blocks_as_in_one(pieces: list[bytes], block_rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in.csv").write_bytes(b"id,text\n" + b"".join(pieces))
        rows, errors = read_all(Path(folder) / "in.csv", block_rows)
        assert (rows, errors) == read_all(Path(folder) / "in.csv", 1000)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_header_may_have_line_ends_in_quotes(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "in.csv").write_bytes(mark + b'"id\nof it",text\n1,a\n2,b\n')
    rows, errors = read_all(tmp_path / "in.csv", 1)
    assert rows == [{"id\nof it": "1", "text": "a"}, {"id\nof it": "2", "text": "b"}] and not any(errors)
    (tmp_path / "in.csv").write_bytes(mark + b'"id,text\n1,a\n')
    with pytest.raises(OfframpError, match="the header of"):
        input_schema(find_files(tmp_path / "in.csv"))


def test_a_line_ends_in_quotes_if_a_field_is_open() -> None:
    assert ends_in_quotes(b'1,"a\n', False) and ends_in_quotes(b'b ""\n', True)
    assert not ends_in_quotes(b'1,5" wide\n', False) and not ends_in_quotes(b'b",2\n', True)


def test_files_of_an_address_are_opened_as_it_says(tmp_path: Path) -> None:
    folder = tmp_path / "my dir %"
    folder.mkdir()
    for ending in ("jsonl", "csv", "parquet"):
        write(folder / f"a b.{ending}", ROWS)
        for address in (folder.as_uri() + f"/*.{ending}", (folder / f"a b.{ending}").as_uri()):
            files = find_files(address)
            reader = BlockReader()
            read = [reader.read(block) for block in plan_blocks(files, 10)]
            assert [row for block in read for row in block.rows] == ROWS
            assert input_schema(files).names == ["id", "text"]


def test_options_and_host_of_an_address_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is found by its address only: `?root=FOLDER` says what it holds."""

    def by_options(place: str | Path) -> tuple[Any, str]:
        parts = urlsplit(str(place))
        root = parse_qs(parts.query)["root"][0]
        return pyarrow.fs.SubTreeFileSystem(root, pyarrow.fs.LocalFileSystem()), parts.path.strip("/")

    for name in ("one", "two"):
        (tmp_path / name / "in").mkdir(parents=True)
        write(tmp_path / name / "in" / "a.jsonl", [{"text": name}])
    output = OutputFolder(tmp_path / "out", "jsonl")
    monkeypatch.setattr(blocks, "file_system", by_options)
    one, two = (f"store://user:secret@host:80/in/?root={tmp_path / name}" for name in ("one", "two"))
    files = find_files(one)
    (block,) = plan_blocks(files, 10)
    assert BlockReader().read(block).rows == [{"text": "one"}]
    output.write_manifest({}, [block])
    manifest = output.read_manifest()
    assert manifest is not None and "secret" not in json.dumps(manifest)
    assert manifest_blocks(manifest, files) == [block]
    assert len(find_files([one, one.replace("in/?", "in?")])) == 1
    with pytest.raises(OfframpError, match="two file systems"):
        find_files([one, two])


def test_columns_are_those_of_the_first_rows_whatever_file_has_them(tmp_path: Path) -> None:
    for number, text in enumerate(["", "{\n", '{"text": "a"}\n', '{"id": 1}\n']):
        (tmp_path / f"part-0000{number}.jsonl").write_text(text)
    assert input_schema(find_files(tmp_path)).names == ["text", "id"]


def test_find_files_refuses_what_cannot_be_answered_together(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="no file"):
        find_files(tmp_path / "*.jsonl")
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.csv", ROWS)
    with pytest.raises(OfframpError, match="csv and jsonl"):
        find_files(tmp_path)
    with pytest.raises(OfframpError, match=r"in\.txt"):
        (tmp_path / "in.txt").write_text("a")
        find_files(tmp_path / "in.txt")


@pytest.mark.parametrize("name", ["_in.jsonl", ".in.jsonl", "in[1].jsonl", "in?.jsonl"])
def test_a_file_that_is_named_is_found_whatever_its_name(tmp_path: Path, name: str) -> None:
    place, other = write(tmp_path / name, ROWS), write(tmp_path / "other.jsonl", ROWS)
    assert [file.path for file in find_files(place)] == [str(place)]
    assert [file.path for file in find_files([place, other])] == sorted([str(place), str(other)])
    if name.startswith(("_", ".")):
        assert [file.path for file in find_files(tmp_path)] == [str(other)], "of a folder such names are left out"


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_input_schema_refuses_files_with_other_columns(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"a.{ending}", ROWS)
    write(tmp_path / f"b.{ending}", [{"number": "1", "text": "a"}])
    with pytest.raises(OfframpError, match=rf"b\.{ending}"):
        input_schema(find_files(tmp_path))


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(OfframpError, match=r"in\.parquet"):
        plan_blocks(find_files(tmp_path), 10)
