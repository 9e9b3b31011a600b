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
    """Return which labels each row has: its class, the quartile of its number, its own labels where it may have many,
    or every tag that occurs in it."""  # [rows, labels]
    spans = task.kind == "token" and "words" not in task.provides
    if spans or not data.labelled:
        given = f"rows of the task {task.name!r}" + (", which have no classes" if spans else " without labels")
        fix = "say --set estimation=reconstruction" if spans else f"add the column {task.target!r} to the rows"
        raise OfframpError("mutual information of words and labels", given, fix)
    targets = task.stack_targets([task.inputs_and_targets(e, data.rows[e.example], None)[1] for e in data.encoded])
    classes = task.target_classes(targets)
    if classes.dim() == 2:
        return np.asarray(classes.double().numpy())
    sizes = torch.tensor([len(e.ids) if task.kind == "token" else 1 for e in data.encoded])
    row, labelled = torch.repeat_interleave(torch.arange(len(sizes)), sizes), classes >= 0
    present = torch.zeros(len(sizes), int(classes.max()) + 1, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    return np.asarray(present.index_put((row[labelled], classes[labelled]), one).numpy())
