"""Rows as every contender of a bench gets them: tokenised once, in the same batches, scored in the same way."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offramp.core.columns import ID
from offramp.data.tokenization import Encoded
from offramp.errors import OfframpError
from offramp.evaluation.peers import Logits
from offramp.inference.finetuned import with_known_labels
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data, build_batch
from offramp.tasks import Task

Row = Mapping[str, Any]
Predictions = list[dict[str, Any]]
Exits = NDArray[np.float64]  # [encoded rows]
ORDERS = ("given", "sorted")


@dataclass(frozen=True)
class BenchData:
    """Labelled rows and their token ids."""

    task: Task
    data: Data  # encoded as they enter a model: masked where the task masks
    targets: tuple[torch.Tensor, ...] | None  # for each encoded row, if the task is scored by its loss
    full_macs: float  # of all rows together
    tokenise_ms: float  # a row, all rows in one call

    def calls(self, size: int, order: str) -> list[list[int]]:
        """Return batches as numbers of encoded rows; `sorted` puts rows of similar length together."""
        count = range(len(self.data.encoded))
        rows = sorted(count, key=lambda i: len(self.data.encoded[i].ids)) if order == "sorted" else list(count)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def batch(self, call: Sequence[int]) -> list[Encoded]:
        """Return the encoded rows of a call."""
        return [self.data.encoded[i] for i in call]

    def heaviest(self, calls: Sequence[list[int]], count: int = 2) -> list[list[Encoded]]:
        """Return the batches that need most memory: those with most cells when padded."""
        cells = sorted(calls, key=lambda call: -len(call) * max(len(row.ids) for row in self.batch(call)))
        return [self.batch(call) for call in cells[:count]]

    def scorable(self, call: Sequence[int], logits: Logits) -> list[Any]:
        """Return what `score` needs of each row: its logits, or its losses if the task is scored by its loss."""
        if self.targets is None:
            return list(logits)
        return [self._losses(self.targets[i], one) for i, one in zip(call, logits, strict=True)]

    def _losses(self, target: torch.Tensor, logits: NDArray[Any]) -> list[float]:
        values, length = torch.from_numpy(np.array(logits)).float(), torch.tensor([len(target)])
        return [float(self.task.loss(values, target, length, "rows"))] * int((target >= 0).sum())

    def predictions(self, outputs: Sequence[Any]) -> Predictions | None:
        """Return predictions for all rows from scorable outputs in row order; None if they are losses."""
        return self.task.predictions(self.data.rows, self.data.encoded, outputs) if self.targets is None else None

    def score(self, outputs: Sequence[Any], predictions: Predictions | None) -> dict[str, float]:
        """Return the metrics over all rows."""
        if predictions is not None:
            found = self.task.metrics(self.data.rows, predictions)
        else:
            found = self.task.metrics_from_losses([loss for losses in outputs for loss in losses])
        return {name: round(value, 6) for name, value in found.items()}

    def moved(self, exits: Exits, reference: Exits) -> float:
        """Return the share of rows that exit at another layer; a row of several windows counts if any of them does."""
        owner = np.array([row.example for row in self.data.encoded])
        return len(np.unique(owner[exits != reference])) / len(self.data.rows)


def check_bench_task(model: Predictor) -> None:
    """Refuse a run that decodes word by word: the peers have no counterpart."""
    if model.network.decoder is not None:
        given = f"a run for {model.task.name}, which decodes word by word"
        raise OfframpError("a bench", given, "use benchmarks/speed_by_length.py, which compares a run with itself")


def prepare_bench_data(model: Predictor, rows: Sequence[Row], source: str) -> BenchData:
    """Check and tokenise rows; for a task that is scored by its loss, mask them as `offramp eval` does."""
    check_bench_task(model)
    rows = with_known_labels(model.model, rows)
    model.task.check_rows(rows, source)
    started = time.perf_counter()
    data = Data(rows, model.prepare(rows, source))
    ms = 1000 * (time.perf_counter() - started) / len(rows)
    if not model.task.scores_by_loss:
        return BenchData(model.task, data, None, model.full_macs(data.encoded), ms)
    batch = build_batch(model.task, data, range(len(data.encoded)), seed=None)
    ids = batch.packed.tokens[ID].split(batch.packed.lengths.tolist())
    masked = [replace(row, ids=part.tolist()) for row, part in zip(data.encoded, ids, strict=True)]
    targets = batch.targets.split(batch.packed.lengths.tolist())
    return BenchData(model.task, Data(rows, masked), targets, model.full_macs(masked), ms)
