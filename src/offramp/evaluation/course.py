"""Rows as every contender gets them: tokenised once, in batches as they come or sorted by length, scored alike."""

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
    targets: tuple[torch.Tensor, ...] | None  # of tasks that are scored by their loss: for each encoded row
    full_macs: float  # of all rows together
    tokenise_ms: float  # a row, all rows in one call

    def calls(self, size: int, order: str) -> list[list[int]]:
        """Batches as numbers of encoded rows; sorting puts rows of like length together."""
        count = range(len(self.data.encoded))
        places = sorted(count, key=lambda i: len(self.data.encoded[i].ids)) if order == "sorted" else list(count)
        return [places[start : start + size] for start in range(0, len(places), size)]

    def batch(self, call: Sequence[int]) -> list[Encoded]:
        """The rows of a call."""
        return [self.data.encoded[i] for i in call]

    def heaviest(self, calls: Sequence[list[int]], count: int = 2) -> list[list[Encoded]]:
        """The batches that take most memory: most cells when padded."""
        cells = sorted(calls, key=lambda call: -len(call) * max(len(row.ids) for row in self.batch(call)))
        return [self.batch(call) for call in cells[:count]]

    def note(self, call: Sequence[int], logits: Logits) -> list[Any]:
        """What `score` needs of each answer: its logits, or losses where a vocabulary would be too much to keep."""
        if self.targets is None:
            return list(logits)
        return [self._losses(self.targets[i], one) for i, one in zip(call, logits, strict=True)]

    def _losses(self, target: torch.Tensor, logits: NDArray[Any]) -> list[float]:
        said, length = torch.from_numpy(np.array(logits)).float(), torch.tensor([len(target)])
        return [float(self.task.loss(said, target, length, "rows"))] * int((target >= 0).sum())

    def answers(self, notes: Sequence[Any]) -> Predictions | None:
        """Predictions for all rows, noted in the order of the encoded rows; None where only losses were noted."""
        return self.task.predictions(self.data.rows, self.data.encoded, notes) if self.targets is None else None

    def score(self, notes: Sequence[Any], answers: Predictions | None) -> dict[str, float]:
        """Metrics of all answers."""
        if answers is not None:
            found = self.task.metrics(self.data.rows, answers)
        else:
            found = self.task.metrics_from_losses([loss for losses in notes for loss in losses])
        return {name: round(value, 6) for name, value in found.items()}

    def moved(self, exits: Exits, usual: Exits) -> float:
        """The share of rows that left at another layer; a row cut into windows, if any of them did."""
        owner = np.array([row.example for row in self.data.encoded])
        return len(np.unique(owner[exits != usual])) / len(self.data.rows)


def check_bench_task(model: Predictor) -> None:
    """Refuse a run whose answers no peer gives in one pass."""
    if model.network.decoder is not None:
        given = f"a run for {model.task.name}, which says words one by one"
        raise OfframpError("a bench", given, "`offramp lengths` times a run beside its own full model")


def prepare_bench_data(model: Predictor, rows: Sequence[Row], source: str) -> BenchData:
    """Check and tokenise rows; whoever is scored by loss sees them masked as `offramp eval` masks them."""
    check_bench_task(model)
    model.task.check_rows(rows, source)
    started = time.perf_counter()
    data = Data(rows, model.prepare(rows, source))
    ms = 1000 * (time.perf_counter() - started) / len(rows)
    if not model.task.scores_by_loss:
        return BenchData(model.task, data, None, model.full_macs(data.encoded), ms)
    made = build_batch(model.task, data, range(len(data.encoded)), seed=None)
    ids = made.packed.tokens[ID].split(made.packed.lengths.tolist())
    masked = [replace(row, ids=part.tolist()) for row, part in zip(data.encoded, ids, strict=True)]
    targets = made.targets.split(made.packed.lengths.tolist())
    return BenchData(model.task, Data(rows, masked), targets, model.full_macs(masked), ms)
