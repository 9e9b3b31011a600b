"""One number per text or pair of texts, trained by squared error."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from offramp.data.readers import require_columns
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.tasks import Reduction, Row, Rows, WindowPool, _loss, _texts

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class RegressionTask(_texts.TextTask):
    """Labels are not scaled, so that plain transformers predicts the same numbers."""

    texts: tuple[str, ...] = _texts.SINGLE

    name: ClassVar[str] = "regression"
    answer: ClassVar[str] = "value"
    metric: ClassVar[str] = "pearson"
    outputs: ClassVar[int] = 1
    provides: ClassVar[frozenset[str]] = frozenset({"example_error", "one answer a row"})  # no distribution

    @classmethod
    def from_rows(cls, rows: Rows, source: str) -> Self:
        task = cls(_texts.text_columns(rows))
        task.check_rows(rows, source)
        if len({float(row["label"]) for row in rows}) < 2:
            given = f"{len(rows)} rows without two different labels"
            raise OfframpError(f"numbers to learn in {source}", given, "give rows that differ")
        return task

    @classmethod
    def recognises(cls, row: Row) -> bool:
        """Return whether the row's label is a number with a fraction; whole numbers are classes.

        CSV has all numbers as texts, and there "1.0" may be a class: a whole number beside empty fields.
        """
        label = row.get(cls.target)
        return isinstance(label, float) or (isinstance(label, str) and _is_number(label) and float(label) % 1 != 0)

    def check_rows(self, rows: Rows, source: str) -> None:
        require_columns(rows, [*self.texts, "label"], source)
        _texts.check_texts(rows, self.texts, source)
        for number, row in enumerate(rows, 1):
            if not _is_number(row["label"]):
                given = f"the label {row['label']!r} is not a finite number"
                fix = "write a number, remove the row, or use --task classification for classes"
                raise _texts.row_error(source, number, given, fix)

    @classmethod
    def from_model(cls, config: Mapping[str, Any], texts: Sequence[str]) -> Self | None:
        """Return the task of a model with one output, or of one that says that its output is a number."""
        if not cls.has_head(config):
            return None
        number = len(_texts.model_labels(config)) == 1 or config.get("problem_type") == "regression"
        return cls(tuple(texts)) if number else None

    def config(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "texts": list(self.texts)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(tuple(content["texts"]))

    def pool_windows(self, windows: np.ndarray, pool: WindowPool) -> np.ndarray:
        return np.asarray(windows.mean(axis=0) if pool == "mean" else windows.max(axis=0))

    def inputs_and_targets(self, encoded: Encoded, row: Row, rng: random.Random | None) -> tuple[list[int], float]:
        return encoded.ids, float(row["label"])

    def stack_targets(self, targets: Sequence[float]) -> Tensor:
        return torch.tensor(targets, dtype=torch.float32)  # [rows]

    def loss(self, logits: Tensor, targets: Tensor, lengths: Tensor, reduction: Reduction = "mean") -> Tensor:
        return _loss.reduce_rows((logits.float().squeeze(1) - targets.float()).square(), reduction)

    def example_error(self, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """Return tanh of the absolute error, as in BERxiT."""
        return (logits.float().squeeze(-1) - targets).abs().tanh()  # [rows]

    def answer_scores(self, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """Return the number itself."""
        return logits[:, 0]  # [rows]

    def target_classes(self, targets: Tensor) -> Tensor:
        """Return the quartile of each number among all."""
        edges = torch.quantile(targets.double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
        return torch.searchsorted(edges, targets.double())  # [rows]

    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        return [{"value": float(row[0])} for row in logits]

    def label_scores(self, prediction: Row) -> dict[Any, float]:
        """Return the number as the score of the only label, as pipelines of transformers do."""
        return {"LABEL_0": prediction["value"]}

    def disagreement(self, predictions: Sequence[Row], full: Sequence[Row]) -> list[float]:
        return [min(1.0, abs(a["value"] - b["value"])) for a, b in zip(predictions, full, strict=True)]

    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        """Return correlations and the squared error; a correlation that is not defined (constant values) is 0."""
        from scipy.stats import pearsonr, spearmanr

        true = np.array([float(row["label"]) for row in rows])
        predicted = np.array([prediction["value"] for prediction in predictions])
        defined = len(rows) > 1 and np.ptp(true) > 0 and np.ptp(predicted) > 0
        return {
            "pearson": float(pearsonr(true, predicted).statistic) if defined else 0.0,
            "spearman": float(spearmanr(true, predicted).statistic) if defined else 0.0,
            "mse": float(np.square(true - predicted).mean()),
        }

    def majority_predictions(self, rows: Rows) -> list[dict[str, Any]]:
        return [{"value": 0.0}] * len(rows)

    def labelled(self, row: Row, prediction: Row) -> Row:
        return {**row, "label": prediction["value"]}


def _is_number(value: Any) -> bool:
    """Return whether a label is a finite number, or one written as text (CSV); true and false are classes."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False
    try:
        return math.isfinite(float(value))
    except (ValueError, OverflowError):
        return False
