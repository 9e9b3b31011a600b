"""Mutual information of a word's presence in a row with the row's labels, and depths from it (Liu et al. 2021)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from offramp.core.packed import Packed
from offramp.errors import OfframpError
from offramp.nn.batches import Data, packed_rows
from offramp.nn.words import Vocabulary, Words, vocabulary, words_of
from offramp.tasks import Task

LEAST = 1e-12  # information of a word that tells nothing at all: its logarithm must stay finite
Floats = NDArray[np.float64]


class Seen(NamedTuple):
    """The words of training rows."""

    packed: Packed
    words: Words
    vocabulary: Vocabulary


def seen(task: Task, data: Data, least_count: int = 1) -> Seen:
    """The words that occur often enough in the rows, or an error if none is left."""
    packed = packed_rows(task, data.encoded)
    words = words_of(packed)
    found = vocabulary(words)
    often = found.times >= least_count
    if not bool(often.any()):
        given = f"{len(data.encoded)} rows with {len(found.times)} different words"
        given += f", none of them {least_count} times" if len(found.times) else ""
        fix = "give rows with words in them" + ("" if least_count == 1 else ", or lower least_count")
        raise OfframpError("words to plan depths for", given, fix)
    return Seen(packed, words, found.only(often))


def labels_of(task: Task, data: Data) -> Floats:
    """Which labels each row has: its class, the quarter its number lies in, or every tag that occurs in it."""
    row_of = [data.rows[e.example] for e in data.encoded]
    spans = task.kind == "token" and "words" not in task.provides
    if spans or not data.labelled:
        given = f"rows of the task {task.name!r}" + (", which have no classes" if spans else " without labels")
        fix = "say --set estimation=reconstruction" if spans else f"add the column {task.target!r} to the rows"
        raise OfframpError("mutual information of words and labels", given, fix)
    made = [task.inputs_and_targets(e, row, None)[1] for e, row in zip(data.encoded, row_of, strict=True)]
    targets = task.stack_targets(made)
    if targets.is_floating_point():
        edges = torch.quantile(targets.double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
        targets = torch.searchsorted(edges, targets.double())
    sizes = torch.tensor([len(e.ids) if task.kind == "token" else 1 for e in data.encoded])
    row, real = torch.repeat_interleave(torch.arange(len(sizes)), sizes), targets >= 0
    present = torch.zeros(len(sizes), int(targets.max()) + 1, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    return np.asarray(present.index_put((row[real], targets[real]), one).numpy())  # [rows, labels] of 0 and 1


def mutual_information(which: Tensor, row: Tensor, labels: Floats, smoothing: float) -> Floats:
    """Σ over labels and both presences of P log(P / (P·P)) for every word, in nats.

    `which` [occurrences] numbers the word (−1: none of them), `row` [occurrences] its row. All four counts of a table
    (word or not, label or not) are smoothed, and margins are their sums, so that the information is never negative.
    """  # [words]
    rows, kinds = labels.shape[0], int(which.max()) + 1
    which, row = which[which >= 0], row[which >= 0]
    ones = np.ones(len(which))
    present = csr_array((ones, (which.numpy(), row.numpy())), shape=(kinds, rows))
    present.sum_duplicates()
    present.data[:] = 1.0  # twice in a row is present once
    both = present @ labels  # [words, labels]
    with_word, with_label = np.asarray(present.sum(axis=1))[:, None], labels.sum(0)[None, :]
    counts = np.stack([both, with_word - both, with_label - both, rows - with_word - with_label + both]) + smoothing
    yes, only_word, only_label, _ = joint = counts / counts.sum(0)
    word, label = yes + only_word, yes + only_label
    apart = np.stack([word * label, word * (1 - label), (1 - word) * label, (1 - word) * (1 - label)])
    return np.asarray((joint * np.log(joint / apart)).sum((0, 2)))


def depths_by_information(information: Floats, layers: int, least: float = LEAST) -> NDArray[np.int64]:
    """−log of it cut into as many bins of equal width as there are layers: what tells most goes least deep. What tells
    less than `least` counts as that much: a single word that tells next to nothing would make all bins wide."""
    scale = -np.log(np.maximum(information, least))
    edges = np.linspace(scale.min(), scale.max(), layers + 1)[1:-1]
    return np.digitize(scale, edges, right=True) + 1  # an edge belongs to the shallower bin
