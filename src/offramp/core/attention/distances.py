"""Attention logits that depend on the distance between a query and a key in the original row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RelativePositions:
    """Tables that turn the distance i − j of query i and key j into a logit, added and never divided by √width.

    Every distance has an entry in the tables. `with_queries` is multiplied with the query and `with_keys` with the key
    of a pair; `bias` is added as it is. Tables of one head serve all heads.
    """

    reach: int  # larger distances count as this one
    with_queries: Tensor | None = None  # [entries, heads or 1, width]
    with_keys: Tensor | None = None  # [entries, heads or 1, width]
    bias: Tensor | None = None  # [entries, heads]
    entries: Tensor | None = None  # [2·reach + 1] entry of each distance −reach…reach; None: distance + reach

    def logits(self, query: Tensor, key: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        """Return the logits of every query and key of a rectangle.

        `query` and `key` are [rows, heads, n, width], `places` their original positions [rows, n].
        """
        if self._trains_without_entries(query) and are_whole_rows(*places):
            return self._logits_of_whole_rows(query, key)
        distance = places[0][:, :, None] - places[1][:, None, :]  # [rows, queries, keys]
        index = distance.clamp(-self.reach, self.reach) + self.reach
        index = index if self.entries is None else F.embedding(index, self.entries[:, None]).squeeze(-1)
        each_head = index[:, None].expand(-1, query.shape[1], -1, -1)  # [rows, heads, queries, keys]
        parts = []
        if self.with_queries is not None:
            parts.append((query @ self.with_queries.permute(1, 2, 0)).gather(-1, each_head))
        if self.with_keys is not None:
            by_key = (key @ self.with_keys.permute(1, 2, 0)).gather(-1, each_head.transpose(2, 3))
            parts.append(by_key.transpose(2, 3))
        if self.bias is not None:
            parts.append(F.embedding(index, self.bias).permute(0, 3, 1, 2))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total  # [rows, heads, queries, keys]

    def _trains_without_entries(self, query: Tensor) -> bool:
        """Return whether this is training on a CPU with a vector a distance; traced engines cannot look at places."""
        return query.requires_grad and query.device.type == "cpu" and self.bias is None and self.entries is None

    def _logits_of_whole_rows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the logits where place i holds position i: all rows have the same distances, so views replace gathers.

        In a block [places, distances] of products the entry of a pair lies one further for every next place, so that a
        view with another stride has all pairs.
        """
        total, size = None, query.shape[2]
        if self.with_queries is not None:
            table = self.with_queries.flip(0)  # the largest distance first
            total = _diagonals(self._every_distance(query, table, size))  # [rows, heads, queries, keys]
        if self.with_keys is not None:
            by_key = _diagonals(self._every_distance(key, self.with_keys, size)).transpose(2, 3)
            total = by_key if total is None else total + by_key
        assert total is not None
        return total

    def _every_distance(self, x: Tensor, table: Tensor, size: int) -> Tensor:
        """Return products of states with all distances of `size` places."""  # [rows, heads, places, 2·size − 1]
        reach = min(self.reach, size - 1)
        products = x @ table.permute(1, 2, 0)  # with all distances, as the cost of a layer counts them
        products = products[..., self.reach - reach : self.reach + reach + 1]
        beyond = size - 1 - reach
        if not beyond:
            return products
        first, last = (products[..., end : end + 1].expand(-1, -1, -1, beyond) for end in (0, 2 * reach))
        return torch.cat((first, products, last), -1)

    def select_heads(self, heads: Tensor) -> RelativePositions:
        """Return the tables of some heads only."""
        with_queries, with_keys, bias = (
            table if table is None or table.shape[1] == 1 else table.index_select(1, heads.to(table.device))
            for table in (self.with_queries, self.with_keys, self.bias)
        )
        return replace(self, with_queries=with_queries, with_keys=with_keys, bias=bias)


def are_whole_rows(queries: Tensor, keys: Tensor) -> bool:
    """Return whether queries and keys are the same tokens and place i holds position i, or filler (position 0)."""
    if queries.shape != keys.shape:
        return False
    counted = torch.arange(queries.shape[1], device=queries.device)
    return torch.equal(queries, keys) and bool(((queries == counted) | (queries == 0)).all())


def _diagonals(products: Tensor) -> Tensor:
    """Return entry (i, size − 1 − i + j) of products [rows, heads, size, 2·size − 1] at (i, j), as a view."""
    rows, heads, size, wide = products.shape
    products = products.contiguous()
    row, head = heads * size * wide, size * wide
    return products.as_strided(
        (rows, heads, size, size), (row, head, wide - 1, 1), products.storage_offset() + size - 1
    )


def add_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Apply a mask to attention logits: boolean (True = visible), or added."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
