"""The labels of rows as a matrix."""

from __future__ import annotations

from typing import Any

import pytest

from offramp import tasks
from offramp.errors import OfframpError
from offramp.nn.batches import Data
from offramp.nn.row_labels import row_labels
from tests import factories


def test_row_labels_are_the_class_or_the_tags_that_occur() -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "label": 0, "tokens": ["a"], "tags": ["O"]},
        {"text": "a", "label": 1, "tokens": ["a"], "tags": ["B-X"]},
        {"text": "a", "label": 1, "tokens": ["a"], "tags": ["O"]},
    ]
    data = Data(rows, factories.encode([[5], [6], [7]]))
    assert row_labels(tasks.get("classification").from_rows(rows, "rows"), data).tolist() == [[1, 0], [0, 1], [0, 1]]
    assert row_labels(tasks.get("tagging").from_rows(rows, "rows"), data).tolist() == [[1, 0], [0, 1], [1, 0]]


def test_row_labels_of_rows_with_several_labels_are_those_labels() -> None:
    rows = [{"text": "a", "labels": ["x", "z"]}, {"text": "a", "labels": []}, {"text": "a", "labels": ["y"]}]
    task = tasks.get("multi_label").from_rows(rows, "rows")
    labels = row_labels(task, Data(rows, factories.encode([[5], [6], [7]])))
    assert labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


def test_row_labels_of_numbers_are_quartiles() -> None:
    rows = [{"text": "a", "label": number} for number in (0.5, 9.0, 1.5, 1.5, 4.0, 2.5)]
    task = tasks.get("regression").from_rows(rows, "rows")
    labels = row_labels(task, Data(rows, factories.encode([[5]] * 6)))
    assert labels.argmax(1).tolist() == [0, 3, 0, 0, 3, 2] and labels.sum() == 6


@pytest.mark.parametrize(
    ("name", "fix"), [("question_answering", "estimation=reconstruction"), ("classification", "column 'label'")]
)
def test_row_labels_refuses_rows_without_classes_or_labels(name: str, fix: str) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "label": i, "question": "a", "context": "a", "answers": {"text": ["a"], "answer_start": [0]}}
        for i in range(2)
    ]
    task = tasks.get(name).from_rows(rows, "rows")
    with pytest.raises(OfframpError, match=fix):
        row_labels(task, Data(rows, factories.encode([[5], [6]]), labelled=name == "question_answering"))
