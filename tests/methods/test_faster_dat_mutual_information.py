"""Mutual information against a slow, obvious computation, and depths from it."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from offramp import tasks
from offramp.errors import OfframpError
from offramp.methods.faster_dat.mutual_information import (
    bins_of_information,
    bins_of_running_words,
    mutual_information,
)
from offramp.methods.faster_dat.word_depths import row_words
from offramp.nn.batches import Data
from tests import factories

SENTENCES = ["a good film", "a bad film", "good good fun", "a film", "bad bad", "not a bad film"]
LABELS = [1, 0, 1, 1, 0, 2]


def information_by_hand(word: str, smoothing: float) -> float:
    """Return equation 2 of the paper for one word."""
    total = 0.0
    for label in set(LABELS):
        pairs = [(word in text.split(), own == label) for text, own in zip(SENTENCES, LABELS, strict=True)]
        count = {cell: pairs.count(cell) + smoothing for cell in product((True, False), repeat=2)}
        rows = sum(count.values())
        for x, y in count:
            p = count[x, y] / rows
            p_x = (count[x, True] + count[x, False]) / rows
            p_y = (count[True, y] + count[False, y]) / rows
            total += p * math.log(p / (p_x * p_y))
    return total


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_mutual_information_equals_the_computation_by_hand(smoothing: float) -> None:
    known = sorted({word for text in SENTENCES for word in text.split()})
    which = torch.tensor([known.index(word) for text in SENTENCES for word in text.split()])
    row = torch.tensor([i for i, text in enumerate(SENTENCES) for _ in text.split()])
    information = mutual_information(which, row, np.eye(3)[LABELS], smoothing)
    assert information.tolist() == pytest.approx([information_by_hand(word, smoothing) for word in known])
    without = mutual_information(torch.where(which == 0, -1, which - 1), row, np.eye(3)[LABELS], smoothing)
    assert without.tolist() == pytest.approx(
        information.tolist()[1:]
    )  # a word that is left out changes nothing for others


def test_depths_by_information_are_bins_of_equal_width() -> None:
    scale = np.array([1.0, 1.9, 2.0, 2.1, 3.0, 3.9, 4.0])  # −log of the information
    assert bins_of_information(np.exp(-scale), 3).tolist() == [1, 1, 1, 2, 2, 3, 3]
    assert bins_of_information(np.exp(-scale), 1).tolist() == [1] * 7
    assert bins_of_information(np.array([0.0, 0.5]), 4).tolist() == [4, 1]  # a word without information goes deepest
    assert bins_of_information(np.array([0.3]), 4).tolist() == [1]


def test_depths_by_information_does_not_widen_bins_for_words_without_information() -> None:
    information = np.array([0.1, 1e-3, 1e-5, 0.0])
    assert bins_of_information(information, 4).tolist() == [1, 1, 2, 4]
    assert bins_of_information(information, 4, least=1e-6).tolist() == [1, 2, 4, 4]


def test_bins_of_running_words_hold_equal_shares_of_the_text() -> None:
    information, times = np.array([0.1, 0.5, 0.2, 0.3, 0.4]), np.array([4, 1, 2, 2, 3])
    assert bins_of_running_words(information, times, 3).tolist() == [3, 1, 2, 2, 1]  # 4, 4 and 4 running words
    assert bins_of_running_words(information, times, 1).tolist() == [1] * 5
    many = np.random.default_rng(0)
    information, times = many.random(500), many.integers(1, 9, 500)
    depths = bins_of_running_words(information, times, 6)
    shares = np.bincount(depths, weights=times)[1:] / times.sum()
    assert np.allclose(shares, 1 / 6, atol=0.01) and (np.diff(depths[np.argsort(-information)]) >= 0).all()


def test_words_refuses_rows_without_words_and_keeps_the_most_frequent_of_rare_ones() -> None:
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    task = tasks.get("classification").from_rows(rows, "rows")
    data = Data(rows, factories.encode([[5], [6]]))
    assert len(row_words(task, data).vocabulary.times) == 2
    assert len(row_words(task, data, least_count=2).vocabulary.times) == 2  # none occurs twice
    often = Data(rows, factories.encode([[5, 5, 6], [6]]))
    assert row_words(task, often, least_count=2).vocabulary.times.tolist() == [2, 2]
    assert row_words(task, Data(rows, factories.encode([[5, 5, 6], [7]])), least_count=9).vocabulary.times.tolist() == [
        2
    ]
    without_words = Data(rows, factories.encode([[5], [5]], [[-1], [-1]]))
    with pytest.raises(OfframpError, match="rows with words"):
        row_words(task, without_words)


def test_information_of_many_rows_is_never_negative() -> None:
    torch.manual_seed(0)
    which, row = torch.randint(0, 10_000, (400_000,)), torch.arange(400_000) // 20
    information = mutual_information(which, row, np.eye(4)[np.arange(20_000) % 4], 0.1)
    assert len(information) == 10_000 and (information >= 0).all()
