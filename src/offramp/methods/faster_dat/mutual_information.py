"""Depths of words by the mutual information of a word's presence in a row and the row's labels (Liu et al. 2021)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from offramp.core.columns import ID
from offramp.methods.faster_dat.word_depths import TableScope, depth_table, row_words
from offramp.nn.batches import Data
from offramp.nn.row_labels import row_labels
from offramp.tasks import Task

LEAST_INFORMATION = 1e-12  # of a word without any information, so that its logarithm is finite
Floats = NDArray[np.float64]


def mutual_information(which: Tensor, row: Tensor, labels: Floats, smoothing: float) -> Floats:
    """Return Σ over labels and both presences of P log(P / (P·P)) for every word, in nats.

    `which` [occurrences] numbers the word (−1: none of them), `row` [occurrences] its row. All four counts of a table
    (word or not, label or not) are smoothed, and margins are their sums, so that the information is never negative.
    """  # [words]
    rows, kinds = labels.shape[0], int(which.max()) + 1
    which, row = which[which >= 0], row[which >= 0]
    ones = np.ones(len(which))
    present = csr_array((ones, (which.numpy(), row.numpy())), shape=(kinds, rows))
    present.sum_duplicates()
    present.data[:] = 1.0  # a word that occurs twice in a row is present once
    both = present @ labels  # [words, labels]
    with_word, with_label = np.asarray(present.sum(axis=1))[:, None], labels.sum(0)[None, :]
    counts = np.stack([both, with_word - both, with_label - both, rows - with_word - with_label + both]) + smoothing
    yes, only_word, only_label, _ = joint = counts / counts.sum(0)
    word, label = yes + only_word, yes + only_label
    apart = np.stack([word * label, word * (1 - label), (1 - word) * label, (1 - word) * (1 - label)])
    return np.asarray((joint * np.log(joint / apart)).sum((0, 2)))


def bins_of_information(information: Floats, layers: int, least: float = LEAST_INFORMATION) -> NDArray[np.int64]:
    """Return depths 1…layers: −log of the information in bins of equal width, the most informative words in the first.

    Information below `least` counts as `least`: a single word with almost none would make all bins wide.
    """  # [words]
    scale = -np.log(np.maximum(information, least))
    edges = np.linspace(scale.min(), scale.max(), layers + 1)[1:-1]
    return np.digitize(scale, edges, right=True) + 1  # an edge belongs to the shallower bin


def bins_of_running_words(information: Floats, times: NDArray[np.int64], layers: int) -> NDArray[np.int64]:
    """Return depths 1…layers that hold equal shares of the running text, the most informative words in the first.

    `times` is how often each word occurs. Where frequent words have little information, bins of equal width hold
    hardly any text in the upper layers.
    """  # [words]
    order = np.argsort(-information, kind="stable")
    before = np.cumsum(times[order]) - times[order]  # running words that are more informative
    depths = np.empty(len(order), dtype=np.int64)
    depths[order] = np.minimum(layers, (before + 0.5 * times[order]) * layers // times.sum() + 1)
    return depths


def depths_by_information(
    task: Task,
    data: Data,
    scope: TableScope,
    smoothing: float,
    informative_deep: bool = False,
    least: float | None = LEAST_INFORMATION,
) -> dict[str, Tensor]:
    """Return the table of `WordDepths`: the more information a word has about the labels, the fewer layers it goes
    through, or (`informative_deep`) the more. `least` of None: bins by running words instead of equal width."""
    found = row_words(task, data, scope.least_count)
    information = mutual_information(found.vocabulary.which, found.words.row, row_labels(task, data), smoothing)
    if least is None:
        bins = bins_of_running_words(information, found.vocabulary.times.numpy(), scope.layers)
    else:
        bins = bins_of_information(information, scope.layers, least)
    depths = torch.from_numpy(bins).float()[:, None]
    depths = scope.layers + 1 - depths if informative_deep else depths
    return depth_table(found.packed.tokens[ID], found.vocabulary, depths, torch.zeros(1), scope.unseen)
