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

    def catch_up(self, block: Projections, states: Tensor, time: int, rows: Ints) -> Ints:
        """Project what left below before now; how many words that were for each of these rows."""
        lag = time - self.filled[rows]
        if lag.any():
            first = int(self.filled[rows[0]])
            if len(rows) == len(self.filled) and (lag == lag[0]).all():
                self.both[:, first:time] = block.copied(states[:, first:time])
            else:
                row, place = (torch.from_numpy(x).to(states.device) for x in _spans(rows, self.filled[rows], lag))
                self.both[row, place] = block.copied(states[row, place])
        self.filled[rows] = time + 1
        return lag

    def write(self, time: int, rows: Tensor | None, both: Tensor) -> None:
        """Keys and values of the word being computed."""
        if rows is None:
            self.both[:, time] = both
        else:
            self.both[rows, time] = both

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
        fresh = np.unique(sentences[~self.met[sentences]])
        if len(fresh) == len(self.met):
            self._hold(block.source(states))
        elif len(fresh):
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
    mask: Tensor | None = None  # [sentences, 1, 1, places], True = look


def look(query: Tensor, keys: Tensor, values: Tensor, asked: Asked) -> Tensor:
    """Attention of single words: one a row over its own words, or all beams of a sentence over one source.

    `query` is [n, hidden], `keys` and `values` [sentences or rows, heads, places, width] stand for all rows: where only
    some have a query the others look too and nobody listens, which costs less than gathering what the few remember.
    """
    rows, total, mask = asked
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


def _spans(rows: Ints, first: Ints, lag: Ints) -> tuple[Ints, Ints]:
    """Row and place of every missing word, where row r lacks `lag` words from `first` on."""
    before = np.repeat(lag.cumsum() - lag, lag)
    place = np.arange(len(before)) - before + np.repeat(first, lag)
    return np.repeat(rows, lag), place
