"""Exit heads that know words: a linear bag of words inside the model, two table look-ups without a matrix product.

The weights of each token and of each pair of neighbours for each answer are summed over the row and added to the logits
of another exit head, which reads the states. On topics such an exit is as accurate as logistic regression on TF-IDF,
before any layer has run. Where tokens were dropped, the tokens that are left are summed.

The tables are either learned with the other exit heads (`BagOfWordsExit`) or solved for before training
(`FittedBagOfWordsExit`): logistic regression over the training rows, in seconds. Its features are a row's tokens and
pairs of neighbours, weighted by how rare they are (idf) and by the row's length. The problem is convex, so no learning
rate and no number of epochs has to be chosen, and rare words are fitted as well as others. A model that was fitted to a
row has memorised its answer, and what is trained on top must not see that: while training, every row gets the tables
that were fitted without its own fold of the rows (`FOLDS`); the tables fitted to all rows are for new rows. Where a row
may have several labels, each of them is a regression of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_array
from scipy.special import expit, log_softmax
from torch import Tensor, nn

from offramp.core.columns import FOLD, ID, POSITION, PRESENT
from offramp.core.cost import HeadCost
from offramp.core.head_spec import DescribedHead, HeadSpec, WordTables
from offramp.core.packed import Packed
from offramp.nn.artifacts import FittedModule, load_or_compute
from offramp.nn.batches import FOLDS, Data, fold_of
from offramp.nn.row_labels import Floats, row_labels
from offramp.tasks import Task

PAIR_BUCKETS = 1 << 16  # pairs of neighbours share this many table rows by a hash of their ids
HASH_FACTORS = (31337, 7919)
TABLES_FILE = "words.safetensors"
SOLVER_STEPS = 200  # at most


class NeighbourPairs(nn.Module):
    """Hashes pairs of neighbours. The hashes of single ids are looked up, because compiled graphs compute in floats,
    which are exact up to 2²⁴."""

    first_hash: Tensor  # [vocabulary, 1]
    second_hash: Tensor  # [vocabulary, 1]

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        ids = torch.arange(vocabulary)[:, None]
        for name, factor in zip(("first_hash", "second_hash"), HASH_FACTORS, strict=True):
            self.register_buffer(name, ids * factor % PAIR_BUCKETS, persistent=False)

    def forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Return the bucket of every token with its successor, and the weight of that pair: 0 after a row's last token,
        and below 1 where a soft token mask lowers the presence of either."""  # [tokens], [tokens]
        ids, position = packed.tokens[ID], packed.tokens[POSITION]
        hashes = F.embedding(ids, self.first_hash) + F.embedding(ids.roll(-1), self.second_hash)
        weight = (position.roll(-1) == position + 1).float()
        present = packed.tokens.get(PRESENT)
        return hashes[:, 0] % PAIR_BUCKETS, weight if present is None else weight * present * present.roll(-1)


class BagOfWordsExit(nn.Module):
    """An exit head whose tables are learned with the other exit heads."""

    TABLE_SCALE = 5.0  # tables learn faster than other new parameters by this factor (Adam ignores a gradient's scale)

    def __init__(self, inner: nn.Module, cost: HeadCost, vocabulary: int, outputs: int) -> None:
        super().__init__()
        self.inner, self.neighbours = inner, NeighbourPairs(vocabulary)
        self.words = nn.Parameter(torch.zeros(vocabulary, outputs))
        self.pairs = nn.Parameter(torch.zeros(PAIR_BUCKETS, outputs))
        self.cost = cost._replace(token=cost.token + 2 * outputs)  # two additions per token and answer

    def spec(self) -> HeadSpec | None:
        """Return the head as plain data, where the inner head is."""
        tables = WordTables(self.words, self.pairs, HASH_FACTORS, None, self.TABLE_SCALE, False)
        return _with_tables(self.inner, tables)

    def forward(self, packed: Packed) -> Tensor:
        """Return the logits of every row."""
        pairs, weight = self.neighbours(packed)
        scores = _times_presence(packed, F.embedding(packed.tokens[ID], self.words))
        scores = scores + F.embedding(pairs, self.pairs) * weight[:, None]
        logits: Tensor = self.inner(packed) + self.TABLE_SCALE * packed.sums(scores)
        return logits


class FittedBagOfWordsExit(FittedModule):
    """An exit head whose tables are solved for before training begins. While the inner head trains, a row gets the
    tables fitted without its fold, which are as new to it as the final tables are to a new row."""

    words: Tensor  # [vocabulary, outputs]
    pairs: Tensor  # [PAIR_BUCKETS, outputs]
    bias: Tensor  # [outputs]
    fold_tables: dict[str, Tensor]  # while training: the same without each fold of the rows, [FOLDS, …]

    def __init__(self, inner: nn.Module, cost: HeadCost, vocabulary: int, outputs: int) -> None:
        super().__init__()
        self.inner, self.neighbours = inner, NeighbourPairs(vocabulary)
        self.register_buffer("words", torch.zeros(vocabulary, outputs))
        self.register_buffer("pairs", torch.zeros(PAIR_BUCKETS, outputs))
        self.register_buffer("bias", torch.zeros(outputs))
        self.fold_tables = {}
        self.cost = cost._replace(token=cost.token + 2 * outputs)

    def prepare(self, task: Task, data: Data, folder: Path) -> None:
        """Solve for the tables, or read them from the folder; without labels they stay zero."""
        if not data.labelled:
            return
        self.set_tables(fit_bag_of_words(self.index, task, data, folder))

    @property
    def index(self) -> FeatureIndex:
        """The columns of features that the tables are fitted to."""
        return FeatureIndex(len(self.words), PAIR_BUCKETS, HASH_FACTORS)

    def set_tables(self, tables: Mapping[str, Tensor]) -> None:
        """Take over tables of `fit_tables`: those fitted to all rows, and those without each fold for training."""
        for name, values in tables.items():
            self.get_buffer(name).copy_(values[0])
            self.fold_tables[name] = values[1:].to(self.words.device)

    def spec(self) -> HeadSpec | None:
        """Return the head as plain data, where the inner head is."""
        return _with_tables(self.inner, WordTables(self.words, self.pairs, HASH_FACTORS, self.bias, 1.0, True))

    def forward(self, packed: Packed) -> Tensor:
        """Return the logits of every row."""
        ids, (pairs, weight), bias = packed.tokens[ID], self.neighbours(packed), self.bias
        word_table, pair_table = self.words, self.pairs
        if self.training and self.fold_tables and FOLD in packed.rows:
            fold = packed.rows[FOLD]
            shift, bias = fold[packed.row_of_token], self.fold_tables["bias"][fold]
            ids, pairs = ids + shift * len(word_table), pairs + shift * PAIR_BUCKETS
            word_table, pair_table = (self.fold_tables[name].flatten(0, 1) for name in ("words", "pairs"))
        scores = (
            _times_presence(packed, F.embedding(ids, word_table)) + F.embedding(pairs, pair_table) * weight[:, None]
        )
        length = packed.sums(_times_presence(packed, torch.ones_like(scores[:, :1])))
        logits: Tensor = self.inner(packed) + bias + packed.sums(scores) * length.rsqrt()
        return logits


def _with_tables(inner: nn.Module, tables: WordTables) -> HeadSpec | None:
    spec = inner.spec() if isinstance(inner, DescribedHead) else None
    return None if spec is None else replace(spec, word_tables=tables)


def _times_presence(packed: Packed, scores: Tensor) -> Tensor:
    """Weigh the scores of tokens by how much the tokens are present."""  # [tokens, …]
    present = packed.tokens.get(PRESENT)
    return scores if present is None else scores * present[:, None]


class FeatureIndex(NamedTuple):
    """The columns of features: tokens first, then pairs of neighbours by a hash of their ids."""

    vocabulary: int
    pairs: int
    factors: tuple[int, int]  # of the hash

    def features(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the columns of a row's features."""
        row = np.asarray(ids, dtype=np.int64)
        pairs = (row[:-1] * self.factors[0] % self.pairs + row[1:] * self.factors[1] % self.pairs) % self.pairs
        return np.concatenate((row, self.vocabulary + pairs))


def fit_bag_of_words(index: FeatureIndex, task: Task, data: Data, folder: Path) -> dict[str, Tensor]:
    """Return the tables of a logistic regression over the training rows, stored in the folder for resuming.

    `words` [1 + FOLDS, vocabulary, outputs], `pairs` [1 + FOLDS, pairs, outputs] and `bias` [1 + FOLDS, outputs]: first
    fitted to all rows, then without each fold.
    """

    def compute() -> dict[str, Tensor]:
        targets = row_labels(task, data)
        targets = np.pad(targets, ((0, 0), (0, task.outputs - targets.shape[1])))
        by_label = "several distributions a row" in task.provides
        return fit_tables(index, [e.ids for e in data.encoded], targets, by_label)

    return load_or_compute(folder / TABLES_FILE, compute)


def fit_tables(
    index: FeatureIndex, rows: Sequence[Sequence[int]], targets: Floats, by_label: bool = False
) -> dict[str, Tensor]:
    """Return the tables for rows of token ids and their target probabilities [rows, outputs], as `fit_bag_of_words`.

    One answer of several is a softmax over all outputs; `by_label`: each output is a yes or no of its own.
    """
    features, fold = _feature_matrix(index, rows), np.array([fold_of(ids) for ids in rows])
    fits = [_fit_logistic_regression(features, targets, fold != left_out, by_label) for left_out in range(-1, FOLDS)]
    weights = torch.from_numpy(np.stack([weight for weight, _ in fits])).float()
    words, pairs = weights.split([index.vocabulary, index.pairs], dim=1)
    return {"words": words, "pairs": pairs, "bias": torch.from_numpy(np.stack([bias for _, bias in fits])).float()}


def logits_without_own_fold(
    index: FeatureIndex, tables: Mapping[str, Tensor], rows: Sequence[Sequence[int]]
) -> NDArray[np.float32]:
    """Return the logits of every row by the tables that were fitted without its fold."""  # [rows, outputs]
    features, fold = _feature_matrix(index, rows), np.array([fold_of(ids) for ids in rows])
    logits = np.zeros((len(rows), tables["bias"].shape[1]), dtype=np.float32)
    for number in range(FOLDS):
        weights = torch.cat((tables["words"][1 + number], tables["pairs"][1 + number])).numpy()
        own = fold == number
        logits[own] = features[own] @ weights + tables["bias"][1 + number].numpy()
    return logits


def _feature_matrix(index: FeatureIndex, rows: Sequence[Sequence[int]]) -> csr_array:
    """Return how often each feature occurs in each row, divided by the root of the row's length."""
    columns = [index.features(ids) for ids in rows]
    row = np.repeat(np.arange(len(rows)), [len(own) for own in columns])
    value = np.repeat([len(ids) ** -0.5 for ids in rows], [len(own) for own in columns])
    shape = (len(rows), index.vocabulary + index.pairs)
    return csr_array((value, (row, np.concatenate(columns))), shape=shape)


def _fit_logistic_regression(
    features: csr_array, targets: Floats, chosen: NDArray[np.bool_], by_label: bool
) -> tuple[Floats, Floats]:
    """Return the weight of each feature for each answer, and the bias: [columns, outputs], [outputs]."""
    chosen_features, chosen_targets = features[chosen], targets[chosen]
    rows, outputs = chosen_targets.shape
    found = np.unique(chosen_features.indices)
    counts = np.bincount(chosen_features.indices, minlength=features.shape[1])[found]  # duplicates were summed: of rows
    idf = np.log((1 + rows) / (1 + counts)) + 1.0
    inputs = csr_array(chosen_features[:, found] * idf[None, :])
    transposed = csr_array(inputs.T)

    def loss_and_gradient(flat: Floats) -> tuple[float, Floats]:
        weight, bias = flat[:-outputs].reshape(-1, outputs), flat[-outputs:]
        logits = inputs @ weight + bias
        if by_label:
            residual = expit(logits) - chosen_targets
            loss = (np.logaddexp(0.0, logits) - chosen_targets * logits).sum()
        else:
            log_probabilities = log_softmax(logits, axis=1)
            residual = np.exp(log_probabilities) - chosen_targets
            loss = -(chosen_targets * log_probabilities).sum()
        gradient = np.concatenate(((transposed @ residual + weight).ravel(), residual.sum(0)))
        return float(0.5 * (weight * weight).sum() + loss), gradient

    start = np.zeros((len(found) + 1) * outputs)
    solution = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options={"maxiter": SOLVER_STEPS})
    weights = np.zeros((features.shape[1], outputs))
    weights[found] = idf[:, None] * solution.x[:-outputs].reshape(-1, outputs)
    return weights, solution.x[-outputs:]
