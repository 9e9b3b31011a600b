"""Blocks: every row of every file lies in exactly one, and damaged rows are rows with an error."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from offramp.distributed.blocks import BlockReader, find_files, input_schema, plan_blocks
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
    blocks = [reader.read(block) for block in plan_blocks(find_files(str(place)), block_rows)]
    return [row for block in blocks for row in block.rows], [error for block in blocks for error in block.errors]


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
