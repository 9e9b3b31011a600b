"""Mutual information against a slow, obvious computation."""

from __future__ import annotations

import math
import time
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from offramp import tasks
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.methods.faster_dat.mutual_information import depths_by_information, mutual_information
from offramp.methods.faster_dat.word_depths import seen
from offramp.nn.batches import Data
from offramp.nn.row_labels import row_labels

SENTENCES = ["a good film", "a bad film", "good good fun", "a film", "bad bad", "not a bad film"]
LABELS = [1, 0, 1, 1, 0, 2]


def slow(word: str, smoothing: float) -> float:
    """Equation 2, word for word."""
    total = 0.0
    for label in set(LABELS):
        pairs = [(word in text.split(), own == label) for text, own in zip(SENTENCES, LABELS, strict=True)]
        count = {cell: pairs.count(cell) + smoothing for cell in product((True, False), repeat=2)}
        whole = sum(count.values())
        for x, y in count:
            p = count[x, y] / whole
            p_x = (count[x, True] + count[x, False]) / whole
            p_y = (count[True, y] + count[False, y]) / whole
            total += p * math.log(p / (p_x * p_y))
    return total


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_information_equals_the_slow_way(smoothing: float) -> None:
    known = sorted({word for text in SENTENCES for word in text.split()})
    which = torch.tensor([known.index(word) for text in SENTENCES for word in text.split()])
    row = torch.tensor([i for i, text in enumerate(SENTENCES) for _ in text.split()])
    made = mutual_information(which, row, np.eye(3)[LABELS], smoothing)
    assert made.tolist() == pytest.approx([slow(word, smoothing) for word in known])
    without = mutual_information(torch.where(which == 0, -1, which - 1), row, np.eye(3)[LABELS], smoothing)
    assert without.tolist() == pytest.approx(made.tolist()[1:])  # a word that is left out changes nothing for others


def test_depths_are_bins_of_equal_width() -> None:
    scale = np.array([1.0, 1.9, 2.0, 2.1, 3.0, 3.9, 4.0])  # −log of the information
    assert depths_by_information(np.exp(-scale), 3).tolist() == [1, 1, 1, 2, 2, 3, 3]
    assert depths_by_information(np.exp(-scale), 1).tolist() == [1] * 7
    assert depths_by_information(np.array([0.0, 0.5]), 4).tolist() == [4, 1]  # what tells nothing goes deepest
    assert depths_by_information(np.array([0.3]), 4).tolist() == [1]


def test_a_floor_keeps_bins_from_hanging_on_words_that_tell_nothing() -> None:
    told = np.array([0.1, 1e-3, 1e-5, 0.0])
    assert depths_by_information(told, 4).tolist() == [1, 1, 2, 4]
    assert depths_by_information(told, 4, least=1e-6).tolist() == [1, 2, 4, 4]


def encoded(rows: list[list[int]]) -> list[Encoded]:
    return [Encoded(row, [0] * len(row), i, list(range(len(row))), [], 0) for i, row in enumerate(rows)]


def test_labels_are_classes_or_the_tags_that_occur() -> None:
    rows = [{"text": "a", "label": label, "tokens": ["a"], "tags": tags}
            for label, tags in ((0, ["O"]), (1, ["B-X"]), (1, ["O"]))]  # fmt: skip
    data = Data(rows, encoded([[5], [6], [7]]))
    classes = tasks.get("classification").from_rows(rows, "rows")
    assert row_labels(classes, data).tolist() == [[1, 0], [0, 1], [0, 1]]
    tags = tasks.get("tagging").from_rows(rows, "rows")
    assert row_labels(tags, data).tolist() == [[1, 0], [0, 1], [1, 0]]


def test_numbers_are_labelled_by_their_quarter() -> None:
    rows = [{"text": "a", "label": number} for number in (0.5, 9.0, 1.5, 1.5, 4.0, 2.5)]
    task = tasks.get("regression").from_rows(rows, "rows")
    made = row_labels(task, Data(rows, encoded([[5]] * 6)))
    assert made.argmax(1).tolist() == [0, 3, 0, 0, 3, 2] and made.sum() == 6


@pytest.mark.parametrize(
    ("name", "fix"), [("question_answering", "estimation=reconstruction"), ("classification", "column 'label'")]
)
def test_rows_without_classes_or_labels_are_refused(name: str, fix: str) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "label": i, "question": "a", "context": "a", "answers": {"text": ["a"], "answer_start": [0]}}
        for i in range(2)
    ]
    task = tasks.get(name).from_rows(rows, "rows")
    with pytest.raises(OfframpError, match=fix):
        row_labels(task, Data(rows, encoded([[5], [6]]), labelled=name == "question_answering"))


def test_a_vocabulary_that_filtering_leaves_empty_is_refused() -> None:
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    task = tasks.get("classification").from_rows(rows, "rows")
    data = Data(rows, encoded([[5], [6]]))
    assert len(seen(task, data).vocabulary.times) == 2
    with pytest.raises(OfframpError, match="least_count"):
        seen(task, data, least_count=2)
    silent = Data(rows, [Encoded([5], [0], i, [-1], [], 0) for i in range(2)])
    with pytest.raises(OfframpError, match="rows with words"):
        seen(task, silent)


def test_many_rows_take_little_time() -> None:
    """20,000 rows of 20 words in a second or so: a hundred thousand in seconds."""
    torch.manual_seed(0)
    which, row = torch.randint(0, 10_000, (400_000,)), torch.arange(400_000) // 20
    started = time.process_time()
    made = mutual_information(which, row, np.eye(4)[np.arange(20_000) % 4], 0.1)
    assert time.process_time() - started < 2.0 and (made >= 0).all()
