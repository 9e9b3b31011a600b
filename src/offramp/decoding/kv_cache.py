"""The KV cache of decoder blocks: keys and values of the target tokens so far and of the source, preallocated.

The decode loop keeps the state of a token that exits after block n. A block above applies its own key and value
projections to that state only when a later token reaches the block, and then to all missing tokens at once. The result
is the same as projecting every token at once, and a block that no token reaches costs nothing.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from offramp.core.decoder import KVProjections

Ints = NDArray[np.int64]
INITIAL_POSITIONS = 32  # room for so many tokens at first; doubled whenever it is used up


def _split_heads(kv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values as views: [rows, positions, 2 · hidden] → [rows, heads, positions, width] each."""
    keys_and_values = kv.unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    return keys_and_values[0], keys_and_values[1]


class SelfAttentionCache:
    """One block's keys and values of the target tokens of every hypothesis."""

    def __init__(self, rows: int, like: Tensor, heads: int) -> None:
        self.heads = heads
        self.filled = np.zeros(rows, dtype=np.int64)  # tokens of each row whose keys and values are here, without gaps
        self._store(like.new_zeros(rows, INITIAL_POSITIONS, 2 * like.shape[-1]))

    def _store(self, kv: Tensor) -> None:
        self.kv = kv  # [rows, positions, 2 · hidden]
        self.keys, self.values = _split_heads(kv, self.heads)

    def fill_missing(self, block: KVProjections, states: Tensor, position: int, rows: Ints) -> Ints | None:
        """Project the tokens before `position` that exited below this block.

        Returns how many tokens that were for each of `rows` ([rows]), or None if there were none. The token at
        `position` itself counts as filled: `write` follows.
        """
        filled = self.filled[rows]
        self.filled[rows] = position + 1
        missing = position - filled
        if not missing.any():
            return None
        if len(rows) == len(self.filled) and (missing == missing[0]).all():
            first = int(filled[0])
            self.kv[:, first:position] = block.project_kv(states[:, first:position])
        else:
            index = torch.from_numpy(_ranges(rows * self.kv.shape[1] + filled, missing)).to(states.device)
            projected = block.project_kv(states.flatten(0, 1).index_select(0, index))
            self.kv.flatten(0, 1).index_copy_(0, index, projected)
        return missing

    def write(self, position: int, rows: Ints, kv: Tensor) -> None:
        """Store keys and values of the tokens being computed."""
        write_position(self.kv, position, rows, kv)

    def grow(self) -> None:
        """Double the room for positions."""
        self._store(torch.cat((self.kv, torch.zeros_like(self.kv)), dim=1))

    def select(self, index: Tensor, rows: Ints) -> None:
        """Keep these rows, in this order; `index` is `rows` on the device of the states."""
        self.filled = self.filled[rows]
        self._store(self.kv.index_select(0, index))


class CrossAttentionCache:
    """One block's keys and values of the source of each sentence, projected when a token first reaches the block."""

    def __init__(self, states: Tensor, heads: int) -> None:
        self.heads = heads
        self.filled = np.zeros(states.shape[0], dtype=bool)
        self.all_filled = False
        self._store(torch.empty(0))

    def _store(self, kv: Tensor) -> None:
        self.kv = kv  # [sentences, tokens, 2 · hidden]; empty before the first use
        if kv.numel():
            self.keys, self.values = _split_heads(kv, self.heads)

    def fill(self, block: KVProjections, states: Tensor, sentences: Ints) -> Ints:
        """Project the source of those `sentences` that are not projected yet and return which ones that were."""
        if self.all_filled:
            return sentences[:0]
        new = sentences[~self.filled[sentences]]
        if not len(new):
            return new
        new = np.unique(new)  # the beams of a sentence share its source
        if len(new) == len(self.filled):
            self._store(block.project_source_kv(states))
        else:
            if not self.kv.numel():
                self._store(states.new_zeros(*states.shape[:2], 2 * states.shape[2]))
            index = torch.from_numpy(new).to(states.device)
            self.kv[index] = block.project_source_kv(states.index_select(0, index))
        self.filled[new] = True
        self.all_filled = bool(self.filled.all())
        return new

    def select(self, index: Tensor, sentences: Ints) -> None:
        """Keep these sentences, in this order; `index` is `sentences` on the device of the states."""
        self.filled = self.filled[sentences]
        self.all_filled = bool(self.filled.all())
        if self.kv.numel():
            self._store(self.kv.index_select(0, index))


def attend_cached(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor | None, total: int, mask: Tensor | None = None
) -> Tensor:
    """Return the attention output of one token a row over cached keys and values: [n, hidden] → [n, hidden].

    `query` belongs to `rows` (None: to all) of `total` rows. `keys` and `values` [owners, heads, positions, width] have
    one owner a row (self-attention) or one owner a sentence, whose beams then share it (cross-attention). `mask`
    [owners, 1, 1, positions] is −∞ where the source is padding. Where at most half of the rows have a query, their keys
    and values are gathered; otherwise the other rows are computed with a query of zeros and dropped, which is faster.
    """
    if rows is not None and total == keys.shape[0] and 2 * rows.shape[0] <= total:
        keys, values = keys.index_select(0, rows), values.index_select(0, rows)
        mask = None if mask is None else mask.index_select(0, rows)
        total, rows = rows.shape[0], None
    owners, heads, _, width = keys.shape
    if rows is not None:
        query = query.new_zeros(total, query.shape[1]).index_copy_(0, rows, query)
    if total == owners:
        attended = F.scaled_dot_product_attention(query.view(total, heads, 1, width), keys, values, attn_mask=mask)
        attended = attended.reshape(total, -1)
    else:
        beams = query.view(owners, total // owners, heads, width).transpose(1, 2)
        attended = F.scaled_dot_product_attention(beams, keys, values, attn_mask=mask)
        attended = attended.transpose(1, 2).reshape(total, -1)
    return attended if rows is None else attended.index_select(0, rows)


def write_position(store: Tensor, position: int, rows: Ints, values: Tensor) -> None:
    """Write values [n, width] of `rows` (or of all rows) at one position of `store` [rows, positions, width]."""
    if len(rows) == store.shape[0]:
        store[:, position] = values
    else:
        index = torch.from_numpy(rows * store.shape[1] + position).to(values.device)
        store.flatten(0, 1).index_copy_(0, index, values)


def _ranges(first: Ints, count: Ints) -> Ints:
    """Return the concatenated ranges first[i] … first[i] + count[i] − 1."""
    return np.arange(int(count.sum())) + np.repeat(first - count.cumsum() + count, count)
