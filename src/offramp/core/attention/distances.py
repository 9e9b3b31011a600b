"""Attention logits from relative positions: every distance has a vector that queries and keys are multiplied with."""

from __future__ import annotations

import torch
from torch import Tensor


def distance_scores(block: tuple[Tensor, Tensor], table: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
    """Return q·E[i−j] + k·E[i−j] for every query i and key j of a rectangle, not divided by √width.

    `block` are queries and keys [rows, heads, n, width], `places` their original positions [rows, n], `table` the
    vectors [2·reach + 1, width] of distances −reach…reach; larger distances count as reach.
    """
    (q, k), reach = block, table.shape[0] // 2
    apart = places[0][:, None, :, None] - places[1][:, None, None, :]  # [rows, 1, queries, keys]
    index = (apart.clamp(-reach, reach) + reach).expand(-1, q.shape[1], -1, -1)
    of_query = (q @ table.T).gather(-1, index)  # [rows, heads, queries, keys]
    of_key = (k @ table.T).gather(-1, index.transpose(2, 3))  # [rows, heads, keys, queries]
    return of_query + of_key.transpose(2, 3)


def add_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Apply a mask to attention logits: boolean (True = visible), or added."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
