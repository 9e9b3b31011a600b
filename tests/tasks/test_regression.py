"""Regression: labels, loss, predictions, metrics, and rows that are refused with their number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.tasks.regression import RegressionTask


def rows(*labels: Any) -> list[dict[str, Any]]:
    return [{"text_a": "x", "text_b": "y", "label": label} for label in labels]


@pytest.mark.parametrize("label", ["high", float("nan"), float("inf"), True, [1.0], "nan", 10**400])
def test_from_rows_refuses_labels_that_are_no_finite_numbers(label: Any) -> None:
    with pytest.raises(OfframpError, match=r"row 2: the label .* is not a finite number"):
        RegressionTask.from_rows(rows(1.0, label), "train.csv")


def test_labels_may_be_numbers_written_as_text() -> None:
    task = RegressionTask.from_rows(rows("0.5", "3"), "train.csv")
    assert task.texts == ("text_a", "text_b")
    assert task.inputs_and_targets(Encoded([1], [0], 0, [-1], [], 0), rows("0.5")[0], None) == ([1], 0.5)


def test_constant_labels_missing_labels_and_empty_texts_are_refused() -> None:
    with pytest.raises(OfframpError, match="without two different labels"):
        RegressionTask.from_rows(rows(1.0, 1), "train.csv")
    with pytest.raises(OfframpError, match="row 2, where 'label' is null"):
        RegressionTask.from_rows(rows(1.0, None), "train.csv")
    with pytest.raises(OfframpError, match="row 1: 'text_a' is empty"):
        RegressionTask(("text_a",)).check_inputs([{"text_a": ""}], "in.csv")


def test_loss_is_the_squared_error_and_predictions_are_the_logits() -> None:
    logits = torch.tensor([[1.0], [4.0]])
    losses = RegressionTask().loss(logits, torch.tensor([0.0, 2.0]), torch.tensor([2, 2]), "rows")
    assert losses.tolist() == [1.0, 4.0]
    assert RegressionTask().loss(logits, torch.tensor([0.0, 2.0]), torch.tensor([2, 2])).item() == 2.5
    assert RegressionTask().predictions([{}, {}], [], [np.array([1.5]), np.array([-2.0])]) == [
        {"value": 1.5},
        {"value": -2.0},
    ]


def test_metrics_are_correlations_and_squared_error() -> None:
    scores = RegressionTask().metrics(rows(1, 2, 3), [{"value": value} for value in (1.0, 4.0, 9.0)])
    assert scores["spearman"] == pytest.approx(1.0)
    assert scores["pearson"] == pytest.approx(np.corrcoef([1, 2, 3], [1, 4, 9])[0, 1])
    assert scores["mse"] == pytest.approx(40 / 3)
    constant = RegressionTask().metrics(rows(1, 2, 3), [{"value": 1.0}] * 3)
    assert constant["pearson"] == constant["spearman"] == 0.0
    assert RegressionTask().metrics(rows(1), [{"value": 2.0}]) == {"pearson": 0.0, "spearman": 0.0, "mse": 1.0}
