"""Confidence of exits: stable numbers, and rows as uncertain as their least certain answer."""

from __future__ import annotations

import math

import pytest
import torch

from offramp.core.packed import pack
from offramp.nn.confidence import (
    entropy,
    largest_in_row,
    row_entropy,
    row_least_confidence,
    row_normalised_entropy,
    same_answers,
)
from offramp.tasks import get

ROWS = [{"text": "a", "label": i, "tokens": ["a", "b", "c"], "tags": ["O", "B-X", "I-X"]} for i in range(3)]
CLASSES = get("classification").from_rows(ROWS, "rows")
TAGS = get("tagging").from_rows(ROWS, "rows")
NUMBER = get("regression").from_rows(ROWS, "rows")


def test_entropy_is_finite_for_logits_that_break_the_published_formulas() -> None:
    """Large logits overflow one public variant; probabilities that underflow to 0 turn another into NaN."""
    logits = torch.tensor([[1e4, 0.0, -1e4], [200.0, -200.0, 0.0], [0.0, 0.0, 0.0], [0.0, float("-inf"), 0.0]])
    assert entropy(logits).tolist() == pytest.approx([0.0, 0.0, math.log(3), math.log(2)])


def test_normalised_entropy_and_least_confidence_of_uniform_and_certain_rows() -> None:
    packed = pack([[1, 2], [3]])
    logits = torch.tensor([[0.0, 0.0, 0.0], [50.0, 0.0, 0.0]])
    assert row_normalised_entropy(CLASSES, logits, packed).tolist() == pytest.approx([1.0, 0.0], abs=1e-6)
    assert row_least_confidence(CLASSES, logits, packed).tolist() == pytest.approx([2 / 3, 0.0], abs=1e-6)


def test_row_entropy_is_that_of_the_least_certain_word_without_its_other_pieces() -> None:
    packed = pack([[1, 2, 3], [4, 5]]).with_tokens(scored=torch.tensor([True, False, True, True, True]))
    certain, uniform = [50.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    logits = torch.tensor([certain, uniform, certain, uniform, certain])
    assert row_entropy(TAGS, logits, packed).tolist() == pytest.approx([0.0, math.log(3)], abs=1e-6)


def test_largest_in_row_is_zero_for_rows_without_answers() -> None:
    assert largest_in_row(torch.tensor([0.7]), torch.tensor([1]), 3).tolist() == pytest.approx([0.0, 0.7, 0.0])


def test_same_answers_compares_labels_tags_and_numbers() -> None:
    packed = pack([[1, 2], [3, 4]]).with_tokens(scored=torch.tensor([True] * 4))
    a, b = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([[9.0, 1.0, 0.0], [3.0, 1.0, 0.0]])
    assert same_answers(CLASSES, a, b, packed, 0.1).tolist() == [True, False]
    tags = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1.0, 0, 0], [0, 1.0, 0]])
    other = torch.tensor([[5.0, 0, 0], [0, 2.0, 0], [1.0, 0, 0], [0, 0, 2.0]])
    assert same_answers(TAGS, tags, other, packed, 0.1).tolist() == [True, False]
    before, now = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.05], [2.2]])
    assert same_answers(NUMBER, before, now, packed, 0.1).tolist() == [True, False]
