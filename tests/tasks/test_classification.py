"""Classification: labels keep their type, predictions, metrics, and rows that are refused with their number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import matthews_corrcoef

from offramp.errors import OfframpError
from offramp.tasks.classification import ClassificationTask, matthews_correlation
from offramp.tasks.regression import RegressionTask
from tests.factories import wordpiece_tokenizer


def rows(*labels: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"text": f"text {index}", "label": label, **more} for index, label in enumerate(labels)]


def refusal(bad: list[dict[str, Any]]) -> str:
    with pytest.raises(OfframpError) as caught:
        ClassificationTask.from_rows(bad, "train.csv")
    return str(caught.value)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ((1, 0, 1), (0, 1)),
        ((7, -1, 3), (-1, 3, 7)),
        (("pos", "neg"), ("neg", "pos")),
        (("10", "9", "1"), ("1", "9", "10")),
        ((True, False), (False, True)),
    ],
)
def test_labels_are_sorted_and_keep_their_type(labels: Any, expected: Any) -> None:
    task = ClassificationTask.from_rows(rows(*labels), "train.csv")
    assert task.labels == expected and [type(label) for label in task.labels] == [type(label) for label in expected]
    best = len(expected) - 1
    (prediction,) = task.predictions([{}], [], [np.arange(len(expected), dtype=np.float32)])
    assert prediction["label"] == expected[best] and type(prediction["label"]) is type(expected[best])
    assert list(prediction["scores"]) == list(expected) and sum(prediction["scores"].values()) == pytest.approx(1.0)
    assert max(prediction["scores"], key=prediction["scores"].get) == prediction["label"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((0, 1, "pos"), "row 1 has 0 (int), row 3 has 'pos' (str)"),
        ((0, True), "row 2 has True (bool)"),
        ((0.5, 1.5), "--task regression"),
        ((["a"], ["b"]), "row 1: the label ['a'] is a list"),
        ((["a"], ["b"]), "--task multi_label --column labels=label"),
        ((1, 1), "one label only: 1"),
        ((), "no label"),
        ((0, None), "row 2, where 'label' is null"),
    ],
)
def test_from_rows_refuses_labels_that_are_no_classes(labels: Any, message: str) -> None:
    assert message in refusal(rows(*labels))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": " \n"}, "row 1: 'text' is empty"),
        ({"text": 7}, "'text' is a int, not a text"),
        ({"text": None}, "row 1, where 'text' is null"),
    ],
)
def test_from_rows_refuses_missing_and_empty_texts(change: dict[str, Any], message: str) -> None:
    assert message in refusal([{**row, **change} for row in rows(0, 1)])


def test_from_rows_names_the_columns_found_if_one_is_missing() -> None:
    message = refusal([{"sentence": "x", "label": 0}, {"sentence": "x", "label": 1}])
    assert "columns found: sentence, label" in message and "--column text=" in message


def test_pairs_of_texts_are_read_encoded_and_checked() -> None:
    pairs = [{"text_a": "a film", "text_b": "good", "label": label} for label in (0, 1)]
    task = ClassificationTask.from_rows(pairs, "train.csv")
    assert task.texts == ClassificationTask.columns_for(pairs) == ("text_a", "text_b")
    assert task.encode(wordpiece_tokenizer(), pairs, 16)[0].types == [0, 0, 0, 0, 1, 1]
    with pytest.raises(OfframpError, match="row 2: 'text_b' is empty"):
        task.check_inputs([pairs[0], {"text_a": "x", "text_b": ""}], "in.jsonl")
    with pytest.raises(OfframpError, match="'text_a' is missing"):
        task.check_inputs([{"text": "x"}], "in.jsonl")


def test_check_rows_refuses_labels_that_training_rows_lack() -> None:
    task = ClassificationTask.from_rows(rows("a", "b"), "train.csv")
    with pytest.raises(OfframpError, match=r"row 2: .*'c'.*'a', 'b'"):
        task.check_rows(rows("a", "c"), "dev.csv")
    with pytest.raises(OfframpError, match="'label' is missing"):
        task.check_rows([{"text": "x"}], "dev.csv")
    with pytest.raises(OfframpError, match="which the training rows lack"):
        task.check_rows(rows(["a"]), "dev.csv")


def test_labels_of_tables_match_numbers_by_their_text() -> None:
    task = ClassificationTask.from_rows(rows(0, 1), "train.jsonl")
    task.check_rows(rows("1", "0"), "dev.csv")
    assert task.metrics(rows("1", "0"), [{"label": 1}, {"label": 1}])["accuracy"] == 0.5


def test_metrics_are_binary_or_macro_averaged() -> None:
    binary = ClassificationTask((0, 1))
    predictions = [{"label": label} for label in (1, 1, 0, 0)]
    assert binary.metrics(rows(1, 0, 1, 0), predictions) == {"accuracy": 0.5, "f1": 0.5, "matthews": 0.0}
    assert binary.metrics(rows(0, 0, 0, 0), predictions)["f1"] == 0.0
    three = ClassificationTask(("a", "b", "c"))
    scores = three.metrics(rows("a", "a", "b", "c"), [{"label": label} for label in "abbc"])
    assert {name: scores[name] for name in ("accuracy", "f1")} == {
        "accuracy": 0.75,
        "f1": pytest.approx((2 / 3 + 2 / 3 + 1) / 3),
    }


@pytest.mark.parametrize("classes", [2, 3])
def test_matthews_correlation_equals_scikit_learn(classes: int) -> None:
    draw = np.random.default_rng(0)
    true, predicted = draw.integers(classes, size=50).tolist(), draw.integers(classes, size=50).tolist()
    found = matthews_correlation(true, predicted, classes)
    assert found == pytest.approx(matthews_corrcoef(true, predicted)) and matthews_correlation(true, true, classes) == 1
    assert matthews_correlation(true, [1] * 50, classes) == 0.0  # one answer for all rows


def test_another_metric_chooses_and_is_stored() -> None:
    task = ClassificationTask((0, 1)).with_metric("matthews")
    assert task.metric == "matthews" and ClassificationTask.from_json(task.to_json()) == task
    assert "metric" not in ClassificationTask((0, 1)).to_json()  # as folders of earlier versions
    assert task.row_scores(rows(0), [{"label": 0}]) is None  # so that losses are estimated, not bounded
    with pytest.raises(OfframpError, match="accuracy, f1, matthews"):
        task.with_metric("bleu")
    with pytest.raises(OfframpError, match="use pearson"):
        RegressionTask().with_metric("matthews")


def test_loss_is_the_mean_cross_entropy() -> None:
    logits, targets, lengths = torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]), torch.tensor([3, 4])
    per_row = ClassificationTask((0, 1)).loss(logits, targets, lengths, "rows")
    expected = torch.tensor([np.log1p(np.exp(-2.0)), np.log(2.0)], dtype=torch.float32)
    torch.testing.assert_close(per_row, expected)
    torch.testing.assert_close(ClassificationTask((0, 1)).loss(logits, targets, lengths), expected.mean())


def test_config_names_the_labels_for_transformers() -> None:
    config = ClassificationTask((3, 5)).config()
    assert config["id2label"] == {0: "3", 1: "5"} and config["label2id"] == {"3": 0, "5": 1}
    assert config["num_labels"] == 2


def test_numbers_in_rows_fit_labels_that_are_texts_of_numbers() -> None:
    task = ClassificationTask(("0", "1"))
    task.check_rows([{"text": "a", "label": 1}], "rows")
    assert task.metrics([{"text": "a", "label": 1}], [{"label": "1"}])["accuracy"] == 1.0


def test_a_number_stands_for_an_output_unless_labels_are_numbers_themselves() -> None:
    named, stars = ClassificationTask(("NEGATIVE", "POSITIVE")), ClassificationTask(("1", "2", "3"))
    assert [named.with_known_label({"label": label})["label"] for label in (1, "0", "POSITIVE")] == [
        "POSITIVE",
        "NEGATIVE",
        "POSITIVE",
    ]
    assert [stars.with_known_label({"label": label})["label"] for label in (1, "1", 3, 0)] == [1, "1", 3, 0]
    assert stars.metrics([{"label": 1}], [{"label": "1"}])["accuracy"] == 1.0
