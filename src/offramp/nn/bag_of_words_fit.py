"""What words say for answers, solved for beforehand: logistic regression over the training rows, in seconds.

Features are a row's tokens and pairs of neighbours, weighted by how rare they are (idf) and by the row's length. The
problem is convex: no learning rate and no number of epochs has to be chosen, and rare words learn as well as others.
A model that has seen a row knows its answer by heart. Whatever learns on top must not see that: every row is told what
tables made from the other rows say (`FOLDS` parts), and tables made from all rows are for rows to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_array
from scipy.special import log_softmax
from torch import Tensor

from offramp.nn.artifacts import load_or_compute
from offramp.nn.batches import FOLDS, Data, fold_of
from offramp.nn.row_labels import labels_of
from offramp.tasks import Task

TABLES_FILE = "words.safetensors"
SOLVER_STEPS = 200  # of the solver at most
Floats = NDArray[np.float64]


class FeatureIndex(NamedTuple):
    """Where features stand: tokens first, then pairs of neighbours by a hash of their ids."""

    vocabulary: int
    pairs: int
    factors: tuple[int, int]  # of the hash

    def features(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """The features of a row."""
        row = np.asarray(ids, dtype=np.int64)
        both = (row[:-1] * self.factors[0] % self.pairs + row[1:] * self.factors[1] % self.pairs) % self.pairs
        return np.concatenate((row, self.vocabulary + both))


def fit_bag_of_words(places: FeatureIndex, task: Task, data: Data, folder: Path) -> dict[str, Tensor]:
    """`words` [1 + FOLDS, vocabulary, outputs], `pairs` [1 + FOLDS, pairs, outputs] and `bias` [1 + FOLDS, outputs]:
    first what all rows say, then what they say without each part. Kept in the folder for resuming."""
    return load_or_compute(folder / TABLES_FILE, lambda: _solved(places, task, data))


def _solved(places: FeatureIndex, task: Task, data: Data) -> dict[str, Tensor]:
    features, answers = _features(places, [e.ids for e in data.encoded]), labels_of(task, data)
    answers = np.pad(answers, ((0, 0), (0, task.outputs - answers.shape[1])))
    part = np.array([fold_of(e.ids) for e in data.encoded])
    made = [_regression(features, answers, part != left_out) for left_out in range(-1, FOLDS)]
    weights = torch.from_numpy(np.stack([w for w, _ in made])).float()
    words, pairs = weights.split([places.vocabulary, places.pairs], dim=1)
    return {"words": words, "pairs": pairs, "bias": torch.from_numpy(np.stack([b for _, b in made])).float()}


def _features(places: FeatureIndex, rows: Sequence[Sequence[int]]) -> csr_array:
    """How often each feature occurs in each row, divided by the root of the row's length."""
    columns = [places.features(ids) for ids in rows]
    row = np.repeat(np.arange(len(rows)), [len(own) for own in columns])
    value = np.repeat([len(ids) ** -0.5 for ids in rows], [len(own) for own in columns])
    shape = (len(rows), places.vocabulary + places.pairs)
    return csr_array((value, (row, np.concatenate(columns))), shape=shape)


def _regression(features: csr_array, answers: Floats, chosen: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """What each feature adds to each answer, and what every row begins with: [columns, outputs], [outputs]."""
    some, truth = features[chosen], answers[chosen]
    rows, outputs = truth.shape
    found = np.unique(some.indices)
    times = np.bincount(some.indices, minlength=some.shape[1])[found]  # duplicates were summed: rows that have it
    rare = np.log((1 + rows) / (1 + times)) + 1.0
    inputs = csr_array(some[:, found] * rare[None, :])
    turned = csr_array(inputs.T)

    def loss(flat: Floats) -> tuple[float, Floats]:
        weight, bias = flat[:-outputs].reshape(-1, outputs), flat[-outputs:]
        said = log_softmax(inputs @ weight + bias, axis=1)
        wrong = np.exp(said) - truth
        slope = np.concatenate(((turned @ wrong + weight).ravel(), wrong.sum(0)))
        return float(0.5 * (weight * weight).sum() - (truth * said).sum()), slope

    begin = np.zeros((len(found) + 1) * outputs)
    solved = minimize(loss, begin, jac=True, method="L-BFGS-B", options={"maxiter": SOLVER_STEPS})
    weights = np.zeros((features.shape[1], outputs))
    weights[found] = rare[:, None] * solved.x[:-outputs].reshape(-1, outputs)
    return weights, solved.x[-outputs:]
