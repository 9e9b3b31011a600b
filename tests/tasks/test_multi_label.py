"""Several labels a row: sigmoids, disagreement over labels, scores counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

import offramp
from offramp.core.packed import pack
from offramp.errors import OfframpError
from offramp.nn.confidence import row_entropy
from offramp.tasks.multi_label import MultiLabelTask
from tests import factories

TASK = MultiLabelTask(("a", "b", "c"))
ROWS = [{"text": "x", "labels": ["a", "b"]}, {"text": "y", "labels": []}, {"text": "z", "labels": "c, a"}]


def test_labels_come_from_lists_and_from_text_with_commas() -> None:
    assert MultiLabelTask.from_rows(ROWS, "rows").labels == ("a", "b", "c")


def test_predictions_are_labels_above_one_half() -> None:
    (prediction,) = TASK.predictions([ROWS[0]], [], [np.array([2.0, -1.0, 0.1], dtype=np.float32)])
    assert prediction["labels"] == ["a", "c"] and prediction["scores"]["a"] == pytest.approx(0.8808, abs=1e-4)


def test_disagreement_is_the_share_of_labels_that_differ() -> None:
    ours = [{"labels": ["a", "b"]}, {"labels": []}, {"labels": ["a"]}]
    full = [{"labels": ["a", "c"]}, {"labels": []}, {"labels": ["a"]}]
    assert TASK.disagreement(ours, full) == [pytest.approx(2 / 3), 0.0, 0.0]


def test_metrics_counted_by_hand() -> None:
    scores = TASK.metrics(ROWS, [{"labels": ["a"]}, {"labels": ["b"]}, {"labels": ["a", "c"]}])
    assert scores["micro_f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))  # three right, one too many, one missing
    assert scores["exact_match"] == pytest.approx(1 / 3)


def test_one_label_is_scored_as_one_of_several() -> None:
    rows = [{"text": "x", "labels": labels} for labels in (["a"], ["a"], [], [], [], [], [], [])]
    task = MultiLabelTask.from_rows(rows, "rows")
    given = [{"labels": labels} for labels in (["a"], [], ["a"], [], [], [], [], [])]
    scores = task.metrics(rows, given)  # one right, one too many, one missing; of the absent label nothing is counted
    assert task.labels == ("a",) and scores == {"micro_f1": 0.5, "macro_f1": 0.5, "exact_match": 0.75}
    nothing = [{"labels": []}] * 8
    assert task.metrics(rows, nothing) == {"micro_f1": 0.0, "macro_f1": 0.0, "exact_match": 0.75}


@pytest.mark.parametrize("seed", [0, 1])
def test_f1_of_several_labels_is_that_of_scikit_learn(seed: int) -> None:
    drawn = np.random.default_rng(seed).random((2, 9, 3)) < 0.4
    rows, given = (
        [{"labels": [n for n, own in zip("abc", row, strict=True) if own]} for row in part] for part in drawn
    )
    scores = TASK.metrics(rows, given)
    for name in ("micro", "macro"):
        assert scores[f"{name}_f1"] == pytest.approx(f1_score(*drawn, average=name, zero_division=0.0))


def test_uncertainty_is_that_of_the_least_certain_label() -> None:
    logits = torch.tensor([[9.0, -9.0, 0.0], [9.0, 9.0, -9.0]])
    entropies = row_entropy(TASK, logits, pack([[1], [2]]))
    assert entropies[0].item() == pytest.approx(0.6931, abs=1e-3) and entropies[1] < 0.01


def test_loss_is_the_mean_binary_cross_entropy() -> None:
    targets = TASK.stack_targets([[1.0, 0.0, 0.0]])
    assert TASK.loss(torch.zeros(1, 3), targets, torch.tensor([1])).item() == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("labels", [3, [1, 2], {"a": 1}])
def test_labels_of_another_kind_are_refused(labels: object) -> None:
    with pytest.raises(OfframpError, match="list of labels"):
        TASK.check_rows([{"text": "x", "labels": labels}], "rows")


def test_an_unknown_label_is_refused() -> None:
    with pytest.raises(OfframpError, match="'d'"):
        TASK.check_rows([{"text": "x", "labels": ["d"]}], "rows")


def test_the_score_of_the_right_answer_is_the_sum_of_the_logits_of_its_labels() -> None:
    targets = TASK.stack_targets([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    logits = torch.tensor([[2.0, 30.0, 0.5], [1.0, 2.0, 4.0]])
    assert TASK.answer_scores(logits, targets, torch.tensor([1, 1])).tolist() == [2.5, 7.0]


@pytest.mark.parametrize(
    ("method", "options"),
    [("adapler", {}), ("faster_dat", {}), ("attached", {}), ("branchynet", {"bag_of_words_training": "fitted"})],
)
def test_methods_that_read_the_labels_of_rows_train_on_several_labels(
    base: str, tmp_path: Path, method: str, options: dict[str, str]
) -> None:
    rows = factories.labelled_rows("classification", 60)
    many = [{"text": row["text"], "labels": [w for w in ("good", "film") if w in row["text"].split()]} for row in rows]
    train = factories.write_jsonl(tmp_path / "train.jsonl", many)
    run = offramp.train(model=base, train=train, out=tmp_path / "run", method=method, options=options, epochs=1)
    assert set(offramp.load(run.folder).predict(["a good film"])[0]["labels"]) <= {"good", "film"}
