"""Off-ramps: small heads that answer after a layer.

What a head reads decides how early it can answer. The first token of a sentence-embedding checkpoint carries nothing
before the middle of the stack; mean and maximum over tokens are informative from the embeddings on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from offramp.backbones import linear_macs
from offramp.core.cost import HeadCost
from offramp.core.packed import Packed

Pool = Literal["first", "mean", "meanmax"]


def pool_states(packed: Packed, pool: Pool) -> Tensor:
    """What stands for each row."""  # [rows, hidden], twice as wide for meanmax
    if pool == "first":
        return packed.first()
    return packed.mean() if pool == "mean" else torch.cat((packed.mean(), packed.max()), dim=1)


class ExitHead(nn.Module):
    """Pool (rows) or not (tokens), normalise, drop out, project."""

    def __init__(self, hidden: int, outputs: int, pool: Pool | None, dropout: float = 0.1) -> None:
        super().__init__()
        self.pool = pool
        wide = 2 * hidden if pool == "meanmax" else hidden
        self.dense = nn.Linear(hidden, hidden) if pool == "first" else None
        self.norm = nn.LayerNorm(wide)
        self.dropout = nn.Dropout(dropout)
        self.project = nn.Linear(wide, outputs)
        macs = linear_macs(self)
        self.cost = HeadCost(0, macs) if pool is None else HeadCost(macs, 0)

    def features(self, packed: Packed) -> Tensor:
        """What the head looks at, before the projection."""  # [rows or tokens, wide]
        if self.pool is None:
            seen = packed.states
        else:
            seen = pool_states(packed, self.pool)
            seen = seen if self.dense is None else torch.tanh(self.dense(seen))
        normed: Tensor = self.norm(seen)
        return normed

    def forward(self, packed: Packed) -> Tensor:
        """Logits per row, or per token where `pool` is None."""
        logits: Tensor = self.project(self.dropout(self.features(packed)))
        return logits


class SharedExitHead(nn.Module):
    """An exit through the model's own head: where a head is a whole vocabulary, or has moved down to this layer."""

    def __init__(self, apply: Callable[[Packed], Tensor], cost: HeadCost) -> None:
        super().__init__()
        self._apply_head, self.cost = apply, cost

    def forward(self, packed: Packed) -> Tensor:
        """Logits of the model's own head on an earlier layer's states."""
        return self._apply_head(packed)


class MeanMaxHead(nn.Module):
    """Maximum and mean over all tokens, rectified, projected: Faster-DAT's head."""

    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        self.dropout, self.project = nn.Dropout(0.1), nn.Linear(2 * hidden, outputs)
        self.cost = HeadCost(linear_macs(self), 0)

    def forward(self, packed: Packed) -> Tensor:
        """Logits per row."""
        logits: Tensor = self.project(self.dropout(torch.cat((packed.max(), packed.mean()), dim=1).relu()))
        return logits


class CostOnly(nn.Module):
    """Nothing but a price: what a method computes at a layer besides its exits."""

    def __init__(self, price: Callable[[], HeadCost]) -> None:
        super().__init__()
        self._price = price

    @property
    def cost(self) -> HeadCost:
        """MACs; asked for only when something was computed."""
        return self._price()
