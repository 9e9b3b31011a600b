"""A row that is longer than the tiny model, and reading the output of a batch job."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet

LONG_TEXT = "the film is very good and it is what it is " * 30 + "bad"


def read_output(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all output files in order."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("part-*")):
        if path.suffix == ".parquet":
            rows += pyarrow.parquet.read_table(path).to_pylist()
        elif path.suffix == ".jsonl":
            rows += [json.loads(line) for line in path.read_text().splitlines()]
        else:
            with path.open(newline="") as file:
                rows += list(csv.DictReader(file))
    return rows
