"""Output files: the rows of a block as they were, with the columns of their predictions added.

Every output file of a job has the same columns and types, whatever its rows hold: `label`, `scores` and `error` are
texts (`scores` is JSON), `truncated` is the number of tokens that a row lost, `error` is "" where there is none, and a
row with an error has no other added value.
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from offramp.distributed.blocks import BlockRows, arrow
from offramp.errors import OfframpError

ADDED = ("label", "scores", "exit_layer", "tokens_kept", "macs", "truncated", "error")
FIRST_ADDED = tuple(name for name in ADDED if name != "truncated")  # by jobs whose manifest does not name them
COSTS = ("exit_layer", "tokens_kept", "macs")


def added_names(columns: Sequence[str], added: Sequence[str] = ADDED) -> dict[str, str]:
    """Return the name of each added column; one that the input has already is prefixed, so that rows stay as they are.

    A data set with a column `label` gets `predicted_label`.
    """
    names: dict[str, str] = {}
    for name in added:
        free = name
        while free in columns or free in names.values():
            free = f"predicted_{free}"
        names[name] = free
    return names


def added_values(prediction: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """Return the values of the added columns for a prediction: its answer as text, its scores as JSON, its cost.

    `answer` is the field that holds the answer.
    """
    others = {key: value for key, value in prediction.items() if key not in (answer, *COSTS)}
    scores = others.get("scores", others)
    value = prediction[answer]
    return {
        "label": value if isinstance(value, str) else _json(value),
        "scores": _json(scores),
        "exit_layer": float(prediction["exit_layer"]),
        "tokens_kept": float(prediction["tokens_kept"]),
        "macs": int(prediction["macs"]),
        "truncated": int(prediction.get("truncated", 0)),
        "error": "",
    }


def error_values(error: str) -> dict[str, Any]:
    """Return the values of the added columns for a row that has no prediction."""
    return {**dict.fromkeys(ADDED), "error": error}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """Return a value that JSON knows: numbers of numpy, bytes as base64, dates and decimals as text."""
    if hasattr(value, "item"):
        return value.item()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


class ShardFormat:
    """How the output files of a job are written: their format, the input's columns, and the added ones."""

    def __init__(self, kind: str, schema: Any, added: Sequence[str] = ADDED) -> None:
        self.kind, self.schema = kind, schema
        self.names = added_names(schema.names, added)
        mixed = [field.name for field in schema if str(field.type) == "null"]
        if kind == "parquet" and mixed:
            given = f"{', '.join(mixed)}: values of several types, or none, in the first rows"
            raise OfframpError("a type for every column of a parquet output", given, "write jsonl instead")

    def refusals(self, block: BlockRows) -> list[str]:
        """Return for each row why this format cannot hold it as it is ("" if it can); jsonl holds nearly everything."""
        if block.table is not None:
            return [""] * len(block.rows)
        if self.kind == "parquet" and self._all_fit(block.rows):
            return block.errors
        return [error or self._refusal(row) for row, error in zip(block.rows, block.errors, strict=True)]

    def _all_fit(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Return whether the schema holds all rows, in one quick test."""
        pa, known = arrow(), set(self.schema.names)
        try:
            pa.Table.from_pylist(rows, schema=self.schema)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            return False
        return all(row.keys() <= known for row in rows)

    def _refusal(self, row: Mapping[str, Any]) -> str:
        pa, known = arrow(), set(self.schema.names)
        if self.kind == "jsonl":
            taken = [name for name in self.names.values() if name in row]
            return f"a column {taken[0]!r}, which the first rows lack" if taken else ""
        other = [name for name in row if name not in known]
        if other:
            return f"a column {other[0]!r}, which the first rows lack"
        if self.kind == "parquet":
            try:
                pa.Table.from_pylist([dict(row)], schema=self.schema)
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                return f"a value of another type than in the first rows ({error})"
        return ""

    def encode(self, block: BlockRows, added: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the content of the output file of a block; `added` has the values of `ADDED` for each row."""
        if self.kind == "parquet":
            return self._parquet(block, added)
        rows = [self._row(row, values) for row, values in zip(block.rows, added, strict=True)]
        if self.kind == "jsonl":
            return b"".join(_json_line(row) for row in rows)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, [*self.schema.names, *self.names.values()], extrasaction="ignore")
        writer.writeheader()
        writer.writerows({name: _csv_value(value) for name, value in row.items()} for row in rows)
        return text.getvalue().encode("utf-8", errors="backslashreplace")

    def _row(self, row: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with its added columns; a value of the row itself is never replaced."""
        return {**row, **{free: values[name] for name, free in self.names.items() if free not in row}}

    def _parquet(self, block: BlockRows, added: Sequence[Mapping[str, Any]]) -> bytes:
        pa = arrow()
        table = block.table
        if table is None:
            pairs = zip(block.rows, added, strict=True)
            rows = [self._fitting(row) if values["error"] else row for row, values in pairs]
            table = pa.Table.from_pylist(rows, schema=self.schema)
        types = added_types()
        for name, free in self.names.items():
            values = pa.array([row[name] for row in added], type=types[name])
            table = table.append_column(pa.field(free, types[name]), values)
        sink = io.BytesIO()
        pa.parquet.write_table(table, sink)
        return sink.getvalue()

    def _fitting(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a row that the schema can hold; its error names the others."""
        return {name: value for name, value in row.items() if not self._refusal({name: value})}


def added_types() -> dict[str, Any]:
    """Return the pyarrow type of every added column."""
    pa = arrow()
    text, number, whole = pa.string(), pa.float64(), pa.int64()
    return dict(zip(ADDED, (text, text, number, number, whole, whole, text), strict=True))


def _json_line(row: Mapping[str, Any]) -> bytes:
    try:
        return (_json(row) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate in the row: escaped it can be written
        return (json.dumps(row, default=_plain) + "\n").encode()


def _csv_value(value: Any) -> Any:
    return _json(value) if isinstance(value, dict | list | tuple) else value
