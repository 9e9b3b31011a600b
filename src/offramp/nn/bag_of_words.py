"""Early off-ramps that know words: a linear bag of words inside the model, two tables looked up, no matrix product.

What each token and each pair of neighbours says for each answer is added up, and added to what another off-ramp reads
off the states. On topics it answers like TF-IDF with logistic regression, before any layer has run. Where tokens have
left, those that are there speak.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.core.columns import FOLD, ID, POSITION, PRESENT
from offramp.core.cost import HeadCost
from offramp.core.packed import Packed
from offramp.nn.artifacts import FittedModule
from offramp.nn.bag_of_words_fit import FeatureIndex, fit_bag_of_words
from offramp.nn.batches import Data
from offramp.tasks import Task

PAIR_BUCKETS = 1 << 16  # neighbours share this many places by a hash of their ids
HASH_FACTORS = (31337, 7919)  # of the hash


class NeighbourPairs(nn.Module):
    """Numbers pairs of neighbours. Hashes are looked up: compiled graphs count in floats, exact up to 2²⁴."""

    here: Tensor
    next: Tensor

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        ids = torch.arange(vocabulary)[:, None]
        for name, factor in zip(("here", "next"), HASH_FACTORS, strict=True):
            self.register_buffer(name, ids * factor % PAIR_BUCKETS, persistent=False)

    def forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """The place of every token with its successor, and how much there is of that pair: none after a row's last
        token, little while tokens fade in training."""  # [tokens], [tokens]
        ids, place = packed.tokens[ID], packed.tokens[POSITION]
        both = (F.embedding(ids, self.here) + F.embedding(ids.roll(-1), self.next))[:, 0] % PAIR_BUCKETS
        there = (place.roll(-1) == place + 1).float()
        alone = packed.tokens.get(PRESENT)
        return both, there if alone is None else there * alone * alone.roll(-1)


class BagOfWordsExit(nn.Module):
    """Its tables learn with the other off-ramps."""

    TABLE_SCALE = (
        5.0  # tables learn faster than other fresh parameters by this factor (Adam ignores the scale of a gradient)
    )

    def __init__(self, inner: nn.Module, cost: HeadCost, vocabulary: int, outputs: int) -> None:
        super().__init__()
        self.inner, self.neighbours = inner, NeighbourPairs(vocabulary)
        self.words = nn.Parameter(torch.zeros(vocabulary, outputs))
        self.pairs = nn.Parameter(torch.zeros(PAIR_BUCKETS, outputs))
        self.cost = cost._replace(token=cost.token + 2 * outputs)  # two additions per token and answer

    def forward(self, packed: Packed) -> Tensor:
        """Logits per row."""
        pairs, both = self.neighbours(packed)
        said = _present(packed, F.embedding(packed.tokens[ID], self.words))
        said = said + F.embedding(pairs, self.pairs) * both[:, None]
        logits: Tensor = self.inner(packed) + self.TABLE_SCALE * packed.sums(said)
        return logits


class FittedBagOfWordsExit(FittedModule):
    """Its tables are solved for before training begins. While the off-ramp within learns, a row hears what tables made
    without its part of the rows say, as it would at run time."""

    words: Tensor  # [vocabulary, outputs]
    pairs: Tensor  # [PAIRS, outputs]
    bias: Tensor  # [outputs]
    fold_tables: dict[str, Tensor]  # while training: the same without each part of the rows, [FOLDS, …]

    def __init__(self, inner: nn.Module, cost: HeadCost, vocabulary: int, outputs: int) -> None:
        super().__init__()
        self.inner, self.neighbours = inner, NeighbourPairs(vocabulary)
        self.register_buffer("words", torch.zeros(vocabulary, outputs))
        self.register_buffer("pairs", torch.zeros(PAIR_BUCKETS, outputs))
        self.register_buffer("bias", torch.zeros(outputs))
        self.fold_tables = {}
        self.cost = cost._replace(token=cost.token + 2 * outputs)

    def prepare(self, task: Task, data: Data, folder: Path) -> None:
        """Solve for the tables, or find them solved; without labels they stay empty."""
        if not data.labelled:
            return
        made = fit_bag_of_words(FeatureIndex(len(self.words), PAIR_BUCKETS, HASH_FACTORS), task, data, folder)
        for name, values in made.items():
            self.get_buffer(name).copy_(values[0])
            self.fold_tables[name] = values[1:].to(self.words.device)

    def forward(self, packed: Packed) -> Tensor:
        """Logits per row."""
        ids, (pairs, both), bias = packed.tokens[ID], self.neighbours(packed), self.bias
        words, neighbours = self.words, self.pairs
        if self.training and self.fold_tables and FOLD in packed.rows:
            part = packed.rows[FOLD]
            shift, bias = part[packed.row_of_token], self.fold_tables["bias"][part]
            ids, pairs = ids + shift * len(words), pairs + shift * PAIR_BUCKETS
            words, neighbours = (self.fold_tables[name].flatten(0, 1) for name in ("words", "pairs"))
        said = _present(packed, F.embedding(ids, words)) + F.embedding(pairs, neighbours) * both[:, None]
        length = packed.sums(_present(packed, torch.ones_like(said[:, :1])))
        logits: Tensor = self.inner(packed) + bias + packed.sums(said) * length.rsqrt()
        return logits


def _present(packed: Packed, said: Tensor) -> Tensor:
    """What tokens say, as far as they are still there."""
    alone = packed.tokens.get(PRESENT)
    return said if alone is None else said * alone[:, None]
