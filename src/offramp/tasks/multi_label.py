"""Any number of labels per text or pair of texts: one sigmoid a label, a label is given where it is above one half."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

PROBLEM_TYPE = "multi_label_classification"  # in a Hugging Face configuration
SEPARATOR = ","  # between labels in a column of text (CSV)


@dataclass(frozen=True)
class MultiLabelTask(_texts.LabelTask):
    """Labels in the order of the logits; `texts` are the columns that are read. Rows have a list in `labels`."""

    labels: tuple[str, ...]
    texts: tuple[str, ...] = _texts.SINGLE

    name: ClassVar[str] = "multi_label"
    target: ClassVar[str] = "labels"
    answer: ClassVar[str] = "labels"
    metric: ClassVar[str] = "micro_f1"
    provides: ClassVar[frozenset[str]] = _texts.LabelTask.provides | {"several distributions a row"}

    @classmethod
    def from_rows(cls, rows: Rows, source: str) -> Self:
        texts = _texts.text_columns(rows)
        require_columns(rows, [*texts, "labels"], source)
        _texts.check_texts(rows, texts, source)
        found = {label for number, row in enumerate(rows, 1) for label in _labels_of(row, source, number)}
        if not found:
            raise OfframpError(f"labels in {source}", f"{len(rows)} rows without any", "give rows with labels")
        return cls(tuple(sorted(found)), texts)

    @classmethod
    def recognises(cls, row: Row) -> bool:
        """Return whether the row has labels; of a text in a column with another name, the check says what to do."""
        return cls.target in row

    def check_rows(self, rows: Rows, source: str) -> None:
        require_columns(rows, [*self.texts, "labels"], source)
        _texts.check_texts(rows, self.texts, source)
        for number, row in enumerate(rows, 1):
            for label in _labels_of(row, source, number):
                if label not in self._index:
                    given = f"the label {label!r}, which the model lacks; it has {', '.join(self.labels[:20])}"
                    raise _texts.row_error(source, number, given, "correct the label or remove it")

    @classmethod
    def from_model(cls, config: Mapping[str, Any], texts: Sequence[str]) -> Self | None:
        """Return the task of a model with several outputs that says that a text may have many labels."""
        if not cls.has_head(config) or config.get("problem_type") != PROBLEM_TYPE:
            return None
        labels = tuple(_texts.model_labels(config))
        return cls(labels, tuple(texts)) if len(labels) > 1 else None

    def config(self) -> dict[str, Any]:
        return _texts.label_config(self.labels, PROBLEM_TYPE)

    def pool_windows(self, windows: np.ndarray, pool: WindowPool) -> np.ndarray:
        """Return the logit of the mean (or largest) probability of each label over the windows."""
        probabilities = 1.0 / (1.0 + np.exp(-windows.astype(np.float64)))  # [windows, C]
        pooled = probabilities.mean(axis=0) if pool == "mean" else probabilities.max(axis=0)
        pooled = np.clip(pooled, 1e-15, 1.0 - 1e-15)
        return np.asarray(np.log(pooled) - np.log1p(-pooled))

    def inputs_and_targets(
        self, encoded: Encoded, row: Row, rng: random.Random | None
    ) -> tuple[list[int], list[float]]:
        own = set(_labels_of(row, "the rows", 0))
        return encoded.ids, [float(label in own) for label in self.labels]

    def stack_targets(self, targets: Sequence[list[float]]) -> Tensor:
        return torch.tensor(targets, dtype=torch.float32)  # [rows, labels]

    def loss(self, logits: Tensor, targets: Tensor, lengths: Tensor, reduction: Reduction = "mean") -> Tensor:
        each = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").mean(-1)
        return _loss.reduce_rows(each, reduction)

    def distributions(
        self, logits: Tensor, lengths: Tensor, scored: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return one choice a label, absent or present: [rows · labels, 2]."""
        choices = torch.stack((torch.zeros_like(logits), logits), dim=-1).flatten(0, 1)
        return choices, torch.arange(len(logits), device=logits.device).repeat_interleave(logits.shape[1])

    def example_error(self, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """Return the share of labels that are wrong."""
        return ((logits > 0) != (targets > 0.5)).float().mean(-1)  # [rows]

    def answer_scores(self, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """Return the sum of the logits of a row's labels; of a row without any, of all labels."""
        counted = targets > 0.5
        counted = counted | ~counted.any(1, keepdim=True)
        return (logits * counted).sum(1)  # [rows]

    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        found = []
        for row in logits:
            scores = 1.0 / (1.0 + np.exp(-row.astype(np.float64)))
            given = [label for label, score in zip(self.labels, scores, strict=True) if score > 0.5]
            found.append({"labels": given, "scores": dict(zip(self.labels, scores.tolist(), strict=True))})
        return found

    def disagreement(self, predictions: Sequence[Row], full: Sequence[Row]) -> list[float]:
        """Return the share of labels that differ from the full model's among those that either gives."""
        found = []
        for a, b in zip(predictions, full, strict=True):
            either = set(a["labels"]) | set(b["labels"])
            found.append(len(set(a["labels"]) ^ set(b["labels"])) / len(either) if either else 0.0)
        return found

    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        """Return micro and macro F1 over labels, and the share of rows whose labels are all right.

        They are counted here: of a single label, scikit-learn's averages are over its presence and its absence. A label
        that no row has and that is never given counts as 0.
        """
        true = np.array([[label in _labels_of(row, "the rows", 0) for label in self.labels] for row in rows])
        predicted = np.array([[label in prediction["labels"] for label in self.labels] for prediction in predictions])
        both, either = (true & predicted).sum(axis=0), true.sum(axis=0) + predicted.sum(axis=0)  # [labels]
        return {
            "micro_f1": float(2 * both.sum() / max(1, either.sum())),
            "macro_f1": float((2 * both / np.maximum(1, either)).mean()),
            "exact_match": float((true == predicted).all(axis=1).mean()),
        }

    def majority_predictions(self, rows: Rows) -> list[dict[str, Any]]:
        counts = Counter(tuple(sorted(_labels_of(row, "the rows", 0))) for row in rows)
        ((labels, _),) = counts.most_common(1)
        return [{"labels": list(labels)}] * len(rows)

    def labelled(self, row: Row, prediction: Row) -> Row:
        return {**row, "labels": list(prediction["labels"])}

    @cached_property
    def _index(self) -> dict[str, int]:
        return {label: index for index, label in enumerate(self.labels)}


def _labels_of(row: Row, source: str, number: int) -> list[str]:
    """Return a row's labels: a list, or a text with commas."""
    labels = row["labels"]
    if isinstance(labels, str):
        return [label.strip() for label in labels.split(SEPARATOR) if label.strip()]
    if not isinstance(labels, Sequence) or not all(isinstance(label, str) for label in labels):
        given = f"the labels {labels!r:.60}"
        raise _texts.row_error(source, number, given, "write a list of labels, or one text with commas between them")
    return list(labels)
