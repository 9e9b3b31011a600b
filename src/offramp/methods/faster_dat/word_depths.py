"""A table of how many layers each word goes through.

A word is identified by its pieces (token ids), so that a table needs no text, no tokenizer and no pickles: it is a few
tensors. Looking words up costs one hash of the pieces and one binary search for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offramp.core.columns import ID, POSITION, WORD
from offramp.core.packed import Packed
from offramp.errors import OfframpError
from offramp.nn.batches import Data, pack_rows
from offramp.nn.network import Network
from offramp.nn.words import Words, words_of
from offramp.tasks import Task

WORD_DEPTHS = "depths"  # key of the method's module in Network.added


class TableScope(NamedTuple):
    """Which words a table holds, and the depths it may give."""

    layers: int  # the largest depth
    least_count: int = 1  # words that occur less often are not in the table
    unseen: int = 0  # depth of words that are not in the table; 0: the median of those that are


class RowWords(NamedTuple):
    """The words of training rows."""

    packed: Packed
    words: Words
    vocabulary: Vocabulary


def row_words(task: Task, data: Data, least_count: int = 1) -> RowWords:
    """Return the words that occur often enough in the rows; an error if they have no word at all."""
    packed = pack_rows(task, data.encoded)
    words = words_of(packed)
    found = vocabulary(words)
    if not len(found.times):
        given = f"{len(data.encoded)} rows without a word"
        raise OfframpError("words to plan depths for", given, "give rows with words in them")
    often = found.times >= min(least_count, int(found.times.max()))  # of a few rows the most frequent words
    return RowWords(packed, words, found.only(often))


class Vocabulary(NamedTuple):
    """The distinct words of some rows: how often each occurs, and the tokens of one occurrence."""

    which: Tensor  # [occurrences] number of the word; −1: none of them
    first: Tensor  # [words] index of a token where one occurrence begins
    size: Tensor  # [words] pieces
    times: Tensor  # [words] occurrences

    def only(self, keep: Tensor) -> Vocabulary:
        """Return the words where `keep` is true; occurrences of the others get the number −1."""
        number = torch.where(keep, keep.long().cumsum(0) - 1, -1)
        return Vocabulary(number[self.which], self.first[keep], self.size[keep], self.times[keep])


def vocabulary(words: Words) -> Vocabulary:
    """Return the distinct words among these, in the order of their keys."""
    _, which, count = torch.unique(words.key, return_inverse=True, return_counts=True)
    one = torch.zeros_like(count).scatter_(0, which, torch.arange(len(which)))  # any occurrence serves
    return Vocabulary(which, words.first[one], words.size[one], count)


class WordDepths(nn.Module):
    """How many layers each word goes through, at one or more values of the penalty λ, interpolated between them.

    The table is empty at first, and every word goes through all layers; it takes the size of what is loaded.
    """

    SAVED = ("pieces", "sizes", "counts", "depths", "unseen", "penalties")
    pieces: Tensor  # [all pieces] ids, word after word
    sizes: Tensor  # [words] pieces of each
    counts: Tensor  # [words] occurrences in the rows that it was computed from
    depths: Tensor  # [words, penalties] float
    unseen: Tensor  # [penalties] the depth of words that it lacks
    penalties: Tensor  # [penalties] rising

    def __init__(self, layers: int, penalty: float = 0.0) -> None:
        super().__init__()
        self.layers, self.penalty = layers, penalty  # the largest depth; the λ that is used by default
        none = torch.zeros(0, dtype=torch.int64)
        empty = {"pieces": none, "sizes": none, "counts": none, "depths": torch.zeros(0, 1)}
        self.fill({**empty, "unseen": torch.tensor([float(layers)]), "penalties": torch.zeros(1)})

    def fill(self, table: Mapping[str, Tensor]) -> None:
        """Replace the table by another one of any size."""
        for name in self.SAVED:
            self.register_buffer(name, table[name].clone())
        self._index()
        self._known: dict[tuple[float, torch.device], tuple[Tensor, Tensor]] = {}

    def _index(self) -> None:
        """Sort the keys for binary search."""
        sizes, device = self.sizes.cpu(), self.pieces.device
        word = torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(device)
        position = torch.ones_like(word)
        packed = Packed(torch.empty(0), sizes, {}, {ID: self.pieces, WORD: word, POSITION: position})
        key = words_of(packed).key if len(sizes) else self.pieces[:0]
        self.register_buffer("key", key.sort().values, persistent=False)
        self.register_buffer("place", key.argsort(), persistent=False)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if all(prefix + name in state_dict for name in self.SAVED):
            self.fill({name: state_dict[prefix + name] for name in self.SAVED})
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def depths_for(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Return whole depths of all words, and of words not in the table, at a λ."""  # [words], []
        key = (penalty, self.depths.device)
        if key not in self._known:  # it depends on the table alone, so it is computed once
            both = torch.cat((self.depths, self.unseen[None]))
            depths = interpolate_depths(both, self.penalties, penalty).clamp(1, self.layers)
            self._known[key] = (depths[:-1], depths[-1])
        return self._known[key]

    @property
    def deepest(self) -> int:
        """The largest depth of any word at the default λ."""
        known, unseen = self.depths_for(self.penalty)
        return int(torch.cat((known, unseen[None])).max())

    def look_up(self, words: Words, penalty: float) -> Tensor:
        """Return the depth of each word of a batch."""  # [words]
        known, unseen = self.depths_for(penalty)
        if not len(self.sizes):
            return unseen.expand(len(words.key))
        key, place = self.get_buffer("key"), self.get_buffer("place")
        found = torch.searchsorted(key, words.key).clamp(max=len(key) - 1)
        return torch.where(key[found] == words.key, known[place[found]], unseen)


def interpolate_depths(depths: Tensor, penalties: Tensor, penalty: float) -> Tensor:
    """Return whole depths at a λ between those for which depths are known: [n, penalties] → [n]."""
    right = min(int(torch.searchsorted(penalties, penalty)), len(penalties) - 1)
    left = max(0, right - 1)
    width = float(penalties[right] - penalties[left])
    share = (penalty - float(penalties[left])) / width if width > 0.0 else 0.0
    return torch.floor(torch.lerp(depths[:, left], depths[:, right], min(share, 1.0)) + 0.5).long()


def select_occurrences(found: Vocabulary, most: int) -> Tensor:
    """Return at most this many occurrences of each word, spread evenly over the text; 0: all."""  # [occurrences] bool
    known = found.which >= 0
    if not most:
        return known
    order = found.which.argsort(stable=True)
    before = (~known).sum() + found.times.cumsum(0) - found.times  # occurrences of words that are left out come first
    number = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    number, times = number - before[found.which], found.times[found.which]
    return known & ((times <= most) | ((number + 1) * most // times > number * most // times))


def mean_by_word(found: Vocabulary, each: Tensor, among: Tensor) -> Tensor:
    """Return the mean depth of each word's selected occurrences."""  # [words, penalties]
    which = found.which[among]
    total = each.new_zeros(len(found.times), each.shape[1]).index_add(0, which, each[among])
    return total / torch.bincount(which, minlength=len(found.times))[:, None]


def depth_table(ids: Tensor, found: Vocabulary, depths: Tensor, penalties: Tensor, unseen: int) -> dict[str, Tensor]:
    """Return what `WordDepths` stores, from the depths [words, penalties] of a vocabulary found among `ids` [tokens].

    Words that are not in the table get the depth `unseen`, or (0) the median depth.
    """
    start = torch.repeat_interleave(found.first - (found.size.cumsum(0) - found.size), found.size)
    pieces = ids[start + torch.arange(len(start))]
    others = torch.full_like(depths[0], unseen) if unseen else depths.median(0).values
    return {"pieces": pieces, "sizes": found.size, "counts": found.times, "depths": depths.float(),
            "unseen": others.float(), "penalties": penalties.float()}  # fmt: skip


def word_depths_of(network: Network) -> WordDepths:
    """Return the table of a network."""
    return network.added[WORD_DEPTHS]  # type: ignore[return-value]  # a ModuleDict
