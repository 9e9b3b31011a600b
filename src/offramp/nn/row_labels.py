"""The labels of training rows as a matrix of 0 and 1."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from offramp.errors import OfframpError
from offramp.nn.batches import Data
from offramp.tasks import Task

Floats = NDArray[np.float64]


def row_labels(task: Task, data: Data) -> Floats:
    """Return which labels each row has: its class, the quartile of its number, or every tag that occurs in it."""
    spans = task.kind == "token" and "words" not in task.provides
    if spans or not data.labelled:
        given = f"rows of the task {task.name!r}" + (", which have no classes" if spans else " without labels")
        fix = "say --set estimation=reconstruction" if spans else f"add the column {task.target!r} to the rows"
        raise OfframpError("mutual information of words and labels", given, fix)
    targets = task.stack_targets([task.inputs_and_targets(e, data.rows[e.example], None)[1] for e in data.encoded])
    if targets.is_floating_point():
        edges = torch.quantile(targets.double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
        targets = torch.searchsorted(edges, targets.double())
    sizes = torch.tensor([len(e.ids) if task.kind == "token" else 1 for e in data.encoded])
    row, labelled = torch.repeat_interleave(torch.arange(len(sizes)), sizes), targets >= 0
    present = torch.zeros(len(sizes), int(targets.max()) + 1, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    return np.asarray(present.index_put((row[labelled], targets[labelled]), one).numpy())  # [rows, labels]
