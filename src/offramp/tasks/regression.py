"""One number per text or pair of texts, trained by squared error."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from offramp.data.readers import require_columns
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.tasks import Reduction, Row, Rows, Task, _loss, _texts

if TYPE_CHECKING:
    from typing_extensions import Self

    from offramp.data.tokenization import Tokenizer


@dataclass(frozen=True)
class RegressionTask(Task):
    """Labels are used as they are, without scaling, so that plain transformers predicts the same numbers."""

    texts: tuple[str, ...] = _texts.SINGLE

    name: ClassVar[str] = "regression"
    kind: ClassVar[Literal["row", "token"]] = "row"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    pipeline: ClassVar[str] = "text-classification"
    metric: ClassVar[str] = "pearson"
    outputs: ClassVar[int] = 1
    provides: ClassVar[frozenset[str]] = frozenset({"example_error", "one answer a row"})  # no distribution

    @classmethod
    def columns(cls, rows: Rows) -> tuple[str, ...]:
        return _texts.columns(rows)

    @property
    def input_columns(self) -> tuple[str, ...]:
        return self.texts

    @classmethod
    def from_rows(cls, rows: Rows, source: str) -> Self:
        task = cls(_texts.columns(rows))
        task.check(rows, source)
        if len({float(row["label"]) for row in rows}) < 2:
            given = f"{len(rows)} rows without two different labels"
            raise OfframpError(f"numbers to learn in {source}", given, "give rows that differ")
        return task

    def check(self, rows: Rows, source: str) -> None:
        require_columns(rows, [*self.texts, "label"], source)
        _texts.check(rows, self.texts, source)
        for number, row in enumerate(rows, 1):
            if not _is_number(row["label"]):
                given = f"the label {row['label']!r} is not a finite number"
                fix = "write a number, remove the row, or use --task classification for classes"
                raise _texts.wrong(source, number, given, fix)

    def check_inputs(self, rows: Rows, source: str) -> None:
        _texts.check(rows, self.texts, source)

    def config(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "texts": list(self.texts)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(tuple(content["texts"]))

    def encode(self, tokenizer: Tokenizer, rows: Rows, max_length: int) -> list[Encoded]:
        return _texts.encode(tokenizer, rows, self.texts, max_length)

    def inputs_and_targets(self, encoded: Encoded, row: Row, rng: random.Random | None) -> tuple[list[int], float]:
        return encoded.ids, float(row["label"])

    def stack_targets(self, targets: Sequence[float]) -> Tensor:
        return torch.tensor(targets, dtype=torch.float32)  # [rows]

    def loss(self, logits: Tensor, targets: Tensor, lengths: Tensor, reduction: Reduction = "mean") -> Tensor:
        return _loss.reduce_rows((logits.float().squeeze(1) - targets.float()).square(), reduction)

    def example_error(self, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """The absolute error, squashed as BERxiT does it."""
        return (logits.float().squeeze(-1) - targets).abs().tanh()  # [rows]

    def predictions(self, rows: Rows, encoded: Sequence[Encoded], logits: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        return [{"value": float(row[0])} for row in logits]

    def disagreement(self, predictions: Sequence[Row], full: Sequence[Row]) -> list[float]:
        return [min(1.0, abs(a["value"] - b["value"])) for a, b in zip(predictions, full, strict=True)]

    def metrics(self, rows: Rows, predictions: Sequence[Row]) -> dict[str, float]:
        """Correlations are 0 where they are not defined: fewer than two rows, or a side that never varies."""
        from scipy.stats import pearsonr, spearmanr

        true = np.array([float(row["label"]) for row in rows])
        said = np.array([prediction["value"] for prediction in predictions])
        defined = len(rows) > 1 and np.ptp(true) > 0 and np.ptp(said) > 0
        return {
            "pearson": float(pearsonr(true, said).statistic) if defined else 0.0,
            "spearman": float(spearmanr(true, said).statistic) if defined else 0.0,
            "mse": float(np.square(true - said).mean()),
        }


def _is_number(value: Any) -> bool:
    """A finite number, or one written as text (CSV); true and false are classes."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False
    try:
        return math.isfinite(float(value))
    except (ValueError, OverflowError):
        return False
