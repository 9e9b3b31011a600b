"""One label per text or pair of texts. Labels keep their type: whole numbers, strings, or true and false."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offramp.data.readers import require_columns
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.tasks import Reduction, Row, Rows, WindowPool, _loss, _texts

if TYPE_CHECKING:
    from typing_extensions import Self

Label = str | int | bool
ACCURACY = "accuracy"
METRICS = (ACCURACY, "f1", "matthews")
TRUTH_VALUES = {str(value): value for value in (False, True)}


@dataclass(frozen=True)
class ClassificationTask(_texts.LabelTask):
    """Classes in the order of the logits; `texts` are the columns that are read, `chosen_by` is the metric."""

    labels: tuple[Label, ...]
    texts: tuple[str, ...] = _texts.SINGLE
    chosen_by: str = ACCURACY

    name: ClassVar[str] = "classification"
    disagreement_is_binary: ClassVar[bool] = True

    @classmethod
    def from_rows(cls, rows: Rows, source: str) -> Self:
        texts = _texts.text_columns(rows)
        require_columns(rows, [*texts, "label"], source)
        _texts.check_texts(rows, texts, source)
        return cls(_labels_of(rows, source), texts)

    def check_rows(self, rows: Rows, source: str) -> None:
        require_columns(rows, [*self.texts, "label"], source)
        _texts.check_texts(rows, self.texts, source)
        for number, row in enumerate(rows, 1):
            if not isinstance(row["label"], Label) or row["label"] not in self._index:
                raise _texts.row_error(
                    source,
                    number,
                    f"the label {row['label']!r}, which the training rows lack; they have {_listed(self.labels)}",
                    "correct the label, remove the row, or train on rows that have it",
                )

    @classmethod
    def recognises(cls, row: Row) -> bool:
        """Return whether the row has a label that may be a class: no fraction."""
        return super().recognises(row) and not isinstance(row[cls.target], float)

    @property
    def metric(self) -> str:
        return self.chosen_by

    def with_metric(self, name: str) -> Self:
        if name not in METRICS:
            raise OfframpError(f"a metric of the task {self.name!r}", repr(name), f"use one of: {', '.join(METRICS)}")
        return replace(self, chosen_by=name)

    @classmethod
    def from_model(cls, config: Mapping[str, Any], texts: Sequence[str]) -> Self | None:
        """Return the task of any model with a head for whole texts: more particular tasks are tried first."""
        return cls(tuple(_texts.model_labels(config)), tuple(texts)) if cls.has_head(config) else None

    def with_known_label(self, row: Row) -> Row:
        """Return a row with the label that a number stands for, where no label is a number itself."""
        label = row.get("label")
        number = int(label) if isinstance(label, str) and label.isdecimal() else label  # CSV has "1" where JSON has 1
        numbered = any(isinstance(known, int) for known in self._index)
        if not numbered and isinstance(number, int) and 0 <= number < len(self.labels):
            return {**row, "label": self.labels[number]}
        return row

    def config(self) -> dict[str, Any]:
        return _texts.label_config([str(label) for label in self.labels], "single_label_classification")

    def to_json(self) -> dict[str, Any]:
        return super().to_json() if self.metric == ACCURACY else {**super().to_json(), "metric": self.metric}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return super().from_json(content).with_metric(content.get("metric", ACCURACY))

    def pool_windows(self, windows: np.ndarray, pool: WindowPool) -> np.ndarray:
        """Return the logarithm of the mean (or largest) probability of each label over the windows."""
        raw = windows.astype(np.float64)
        exponentials = np.exp(raw - raw.max(axis=1, keepdims=True))
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)  # [windows, C]
        pooled = probabilities.mean(axis=0) if pool == "mean" else probabilities.max(axis=0)
        return np.asarray(np.log(np.maximum(pooled, np.finfo(np.float64).tiny)))

    def inputs_and_targets(self, encoded: Encoded, row: Row, rng: random.Random | None) -> tuple[list[int], int]:
        return encoded.ids, self._index[row["label"]]

    def stack_targets(self, targets: Sequence[int]) -> Tensor:
        return torch.tensor(targets, dtype=torch.int64)  # [rows]

    def loss(self, logits: Tensor, targets: Tensor, lengths: Tensor, reduction: Reduction = "mean") -> Tensor:
        return _loss.reduce_rows(F.cross_entropy(logits.float(), targets, reduction="none"), reduction)

    def example_error(self, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        return (logits.argmax(-1) != targets).float()  # [rows]

    def answer_scores(self, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """Return the logit of the right label."""
        return logits.gather(1, targets[:, None])[:, 0]  # [rows]

    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        if not logits:
            return []
        raw = np.stack(logits).astype(np.float64)  # [rows, C]
        exponentials = np.exp(raw - raw.max(axis=1, keepdims=True))
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        return [
            {"label": self.labels[best], "scores": dict(zip(self.labels, row, strict=True))}
            for best, row in zip(raw.argmax(axis=1).tolist(), probabilities.tolist(), strict=True)
        ]

    def disagreement(self, predictions: Sequence[Row], full: Sequence[Row]) -> list[float]:
        return [float(a["label"] != b["label"]) for a, b in zip(predictions, full, strict=True)]

    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        """Return accuracy, Matthews correlation, and F1: of the second label of two, else the mean over labels."""
        from sklearn.metrics import accuracy_score, f1_score

        true = [self._index[row["label"]] for row in rows]
        predicted = [self._index[prediction["label"]] for prediction in predictions]
        average = "binary" if self.outputs == 2 else "macro"
        f1 = f1_score(true, predicted, average=average, zero_division=0.0)
        accuracy = float(accuracy_score(true, predicted))
        return {ACCURACY: accuracy, "f1": float(f1), "matthews": matthews_correlation(true, predicted, self.outputs)}

    def row_scores(self, rows: Rows, predictions: Sequence[Row]) -> list[float] | None:
        if self.metric != ACCURACY:
            return None
        both = zip(rows, predictions, strict=True)
        return [float(self._index[row["label"]] == self._index[prediction["label"]]) for row, prediction in both]

    def majority_predictions(self, rows: Rows) -> list[dict[str, Any]]:
        ((label, _),) = Counter(row["label"] for row in rows).most_common(1)
        return [{"label": label}] * len(rows)

    @cached_property
    def _index(self) -> dict[Label, int]:
        """Index of the logit of each label; also by its text, because a CSV file has "1" where JSON has 1,
        and by what its text means, because plain transformers has "1" or "True" where rows have 1 or true."""
        numbered = {label: index for index, label in enumerate(self.labels)}
        index_of: dict[Label, int] = {}
        for label, index in numbered.items():
            if isinstance(label, str) and label.isdecimal():
                index_of[int(label)] = index
            elif label in TRUTH_VALUES:
                index_of[TRUTH_VALUES[label]] = index
            index_of[str(label)] = index
        return {**index_of, **numbered}


def matthews_correlation(true: Sequence[int], predicted: Sequence[int], classes: int) -> float:
    """Return the Matthews correlation, of more than two classes its generalisation; 0 where it is not defined.

    It is CoLA's metric: a model that always gives one class has 0, however frequent that class is.
    """
    counts = np.zeros((classes, classes))
    np.add.at(counts, (true, predicted), 1.0)
    of_true, of_predicted, rows = counts.sum(1), counts.sum(0), counts.sum()
    covariance = counts.trace() * rows - of_true @ of_predicted
    variances = (rows**2 - of_true @ of_true) * (rows**2 - of_predicted @ of_predicted)
    return float(covariance / np.sqrt(variances)) if variances > 0.0 else 0.0


def _labels_of(rows: Rows, source: str) -> tuple[Label, ...]:
    """Return the distinct labels in order (numbers by value), or raise an error if they are no set of classes."""
    first: dict[type, tuple[int, Any]] = {}
    for number, row in enumerate(rows, 1):
        first.setdefault(type(row["label"]), (number, row["label"]))
    if len(first) > 1:
        shown = ", ".join(f"row {n} has {label!r} ({kind.__name__})" for kind, (n, label) in first.items())
        raise OfframpError(f"the labels of {source}", f"mixed types: {shown}", "write all labels in one type")
    for kind, (number, label) in first.items():
        if not issubclass(kind, Label):
            fix = "labels are whole numbers or strings; for scores on a scale use --task regression"
            if isinstance(label, list | tuple):
                fix = "for any number of labels a row use --task multi_label --column labels=label"
            raise _texts.row_error(source, number, f"the label {label!r} is a {kind.__name__}", fix)
    labels = {row["label"] for row in rows}
    if len(labels) < 2:
        given = f"{len(rows)} rows with {'one label only: ' + _listed(tuple(labels)) if labels else 'no label'}"
        raise OfframpError(f"classes to tell apart in {source}", given, "give rows of at least two classes")
    numeric = all(isinstance(label, int) or label.isdecimal() for label in labels)
    return tuple(sorted(labels, key=lambda label: (int(label), str(label)) if numeric else label))


def _listed(labels: Sequence[Label]) -> str:
    shown = ", ".join(repr(label) for label in labels[:20])
    return shown + (f" and {len(labels) - 20} more" if len(labels) > 20 else "")
