"""What decoder blocks remember: keys and values of the words so far and of the source, preallocated.

A word that leaves after block n keeps its state here. A block above applies its own key and value projections to that
state only when a later word reaches it, then to all missing words at once: the values are those of projecting at once,
and a block that nobody reaches is never even read from memory.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
ROOM = 32  # words to begin with; doubled when they are not enough


class Projections(Protocol):
    """The part of a block that turns states into keys and values, side by side."""

    def copied(self, states: Tensor) -> Tensor:
        """Of words: [n, hidden] → [n, 2 · hidden]."""

    def source(self, states: Tensor) -> Tensor:
        """Of the source: [n, hidden] → [n, 2 · hidden]."""


class Words:
    """One block's keys and values of the words of every hypothesis."""

    def __init__(self, rows: int, like: Tensor, heads: int) -> None:
        self.heads, self.wide = heads, like.shape[-1]
        self.filled = np.zeros(rows, dtype=np.int64)  # how many words of each row stand here, without a gap
        self._hold(like.new_zeros(rows, ROOM, 2 * self.wide))

    def _hold(self, both: Tensor) -> None:
        self.both = both  # [rows, words, 2 · hidden]
        apart = both.unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        self.keys, self.values = apart[0], apart[1]  # [rows, heads, words, width] each, views

    def catch_up(self, block: Projections, states: Tensor, time: int, rows: Ints) -> Ints | None:
        """Project what left below before now; how many words that were for each of these rows (None: no word)."""
        filled = self.filled[rows]
        self.filled[rows] = time + 1
        lag = time - filled
        if not lag.any():
            return None
        if len(rows) == len(self.filled) and (lag == lag[0]).all():
            first = int(filled[0])
            self.both[:, first:time] = block.copied(states[:, first:time])
        else:
            index = torch.from_numpy(_spans(rows * self.both.shape[1] + filled, lag)).to(states.device)
            self.both.flatten(0, 1).index_copy_(0, index, block.copied(states.flatten(0, 1).index_select(0, index)))
        return lag

    def write(self, time: int, rows: Ints, both: Tensor) -> None:
        """Keys and values of the word being computed."""
        put(self.both, time, rows, both)

    def grow(self) -> None:
        """Twice the room."""
        self._hold(torch.cat((self.both, torch.zeros_like(self.both)), dim=1))

    def take(self, rows: Tensor, count: Ints) -> None:
        """These rows, in this order, in place of all."""
        self.filled = self.filled[count]
        self._hold(self.both.index_select(0, rows))


class Source:
    """One block's keys and values of each sentence's source; projected when a word first reaches the block."""

    def __init__(self, states: Tensor, heads: int) -> None:
        self.heads, self.whole = heads, False
        self.met = np.zeros(states.shape[0], dtype=bool)
        self._hold(torch.empty(0))

    def _hold(self, both: Tensor) -> None:
        self.both = both  # [sentences, tokens, 2 · hidden]
        if both.numel():
            apart = both.unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
            self.keys, self.values = apart[0], apart[1]

    def meet(self, block: Projections, states: Tensor, sentences: Ints) -> Ints:
        """Project the source of sentences that never came here; which of them were new."""
        if self.whole:
            return sentences[:0]
        fresh = sentences[~self.met[sentences]]
        if not len(fresh):
            return fresh
        fresh = np.unique(fresh)  # beams of one sentence
        if len(fresh) == len(self.met):
            self._hold(block.source(states))
        else:
            if not self.both.numel():
                self._hold(states.new_zeros(*states.shape[:2], 2 * states.shape[2]))
            index = torch.from_numpy(fresh).to(states.device)
            self.both[index] = block.source(states.index_select(0, index))
        self.met[fresh] = True
        self.whole = bool(self.met.all())
        return fresh

    def take(self, sentences: Tensor, count: Ints) -> None:
        """These sentences in place of all."""
        self.met = self.met[count]
        self.whole = bool(self.met.all())
        if self.both.numel():
            self._hold(self.both.index_select(0, sentences))


class Asked(NamedTuple):
    """Whose words look: `rows` of `total` (None: all), and which places of the source are padding."""

    rows: Tensor | None
    total: int
    mask: Tensor | None = None  # [sentences, 1, 1, places], −∞ where there is nothing to see


def look(query: Tensor, keys: Tensor, values: Tensor, asked: Asked) -> Tensor:
    """Attention of single words: one a row over its own words, or all beams of a sentence over one source.

    `query` is [n, hidden], `keys` and `values` [sentences or rows, heads, places, width] stand for all rows. Where few
    have a query, what they remember is gathered; where most have one, the others look too and nobody listens.
    """
    rows, total, mask = asked
    if rows is not None and total == keys.shape[0] and 2 * rows.shape[0] <= total:
        keys, values = keys.index_select(0, rows), values.index_select(0, rows)
        mask = None if mask is None else mask.index_select(0, rows)
        total, rows = rows.shape[0], None
    owners, heads, _, width = keys.shape
    if rows is not None:
        query = query.new_zeros(total, query.shape[1]).index_copy_(0, rows, query)
    if total == owners:
        seen = F.scaled_dot_product_attention(query.view(total, heads, 1, width), keys, values, attn_mask=mask)
        seen = seen.reshape(total, -1)
    else:
        beams = query.view(owners, total // owners, heads, width).transpose(1, 2)
        seen = F.scaled_dot_product_attention(beams, keys, values, attn_mask=mask)
        seen = seen.transpose(1, 2).reshape(total, -1)
    return seen if rows is None else seen.index_select(0, rows)  # [n, hidden]


def put(memory: Tensor, time: int, rows: Ints, values: Tensor) -> None:
    """Values of some rows (or of all) at one position of [rows, words, wide]."""
    if len(rows) == memory.shape[0]:
        memory[:, time] = values
    else:
        index = torch.from_numpy(rows * memory.shape[1] + time).to(values.device)
        memory.flatten(0, 1).index_copy_(0, index, values)


def _spans(first: Ints, lag: Ints) -> Ints:
    """All places from each `first` on, as many as each lacks, one after the other."""
    return np.arange(int(lag.sum())) + np.repeat(first - lag.cumsum() + lag, lag)
