"""Which rows of a file occur in another: calibration notices rows that a model was trained on.

A run folder keeps `training_rows.json`: short digests of the inputs of its training rows, of very many rows only those
with the smallest digests. Rows to calibrate on whose digests lie in the same range show how many of them are training
rows. The file does not contain texts, and a run without it is calibrated without this check.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offramp.errors import OfframpError
from offramp.utils.files import read_json, write_json

FILE = "training_rows.json"
KEPT = 4096  # digests in the file
FEWEST = 5  # comparable rows below which nothing is concluded
MOST_ROWS = 0.5  # share of rows above which they count as training rows
FEW_ROWS = 0.02  # share of rows below which training rows among them change nothing worth mentioning
DISTINCT = 0.9  # share of different texts below which copies count too often
DIGITS = 10  # hexadecimal digits of a digest


def row_marks(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """Return a digest of the inputs of every row; a raw sentence stands for a column of words."""
    return [_mark([row.get(column, row.get("text")) for column in columns]) for row in rows]


def _mark(inputs: list[Any]) -> str:
    text = json.dumps(inputs, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:DIGITS]


@dataclass(frozen=True)
class TrainingMarks:
    """Digests of training rows: all of them, or those up to `largest`."""

    marks: frozenset[str] = frozenset()
    largest: str = "f" * DIGITS

    @property
    def complete(self) -> bool:
        """Whether the digests of all training rows are here."""
        return bool(self.marks) and self.largest == "f" * DIGITS

    def share_of(self, marks: Sequence[str]) -> float:
        """Return the share of rows that are training rows, as far as they can be compared; 0 where few can."""
        comparable = [mark for mark in marks if mark <= self.largest]
        if not self.marks or len(comparable) < min(FEWEST, len(marks)) or not comparable:
            return 0.0
        return sum(mark in self.marks for mark in comparable) / len(comparable)


def training_marks(marks: Sequence[str]) -> TrainingMarks:
    """Return what is kept of the digests of training rows."""
    smallest = sorted(set(marks))
    if len(smallest) <= KEPT:
        return TrainingMarks(frozenset(smallest))
    return TrainingMarks(frozenset(smallest[:KEPT]), smallest[KEPT - 1])


def write_training_marks(folder: Path, marks: TrainingMarks) -> None:
    """Write the digests into a run folder."""
    write_json(folder / FILE, {"largest": marks.largest, "marks": " ".join(sorted(marks.marks))})


def read_training_marks(folder: Path) -> TrainingMarks:
    """Return the digests of a run's training rows; none where the file is missing or damaged."""
    try:
        content = read_json(folder / FILE) if (folder / FILE).is_file() else {}
        return (
            TrainingMarks(frozenset(content["marks"].split()), str(content["largest"])) if content else TrainingMarks()
        )
    except (OfframpError, AttributeError, KeyError, TypeError):
        return TrainingMarks()


def repeated_texts(marks: Sequence[str]) -> list[str]:
    """Return a warning if many rows are copies of others: a test counts each of them as a new one."""
    distinct = len(set(marks)) / max(1, len(marks))
    if distinct >= DISTINCT:
        return []
    return [
        f"only {100 * distinct:.0f} % of the texts are different ones: if the others are copies and do not come back "
        "as often in what is to be answered, proofs are too sure; give each text once"
    ]


def training_rows_reason(share: float) -> str:
    """Return why points that were found on training rows mean nothing."""
    many = "all" if share >= 1.0 else f"about {100 * share:.0f} %"
    return f"{many} of the rows that settings are chosen on are rows the model was trained on"
