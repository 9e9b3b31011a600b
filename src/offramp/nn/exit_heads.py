"""Exit heads: small heads after a layer.

What a head reads decides how early it is accurate. In a sentence-embedding checkpoint the first token carries no
information before the middle layers; mean and maximum over tokens are informative from the embeddings on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offramp.backbones import linear_macs
from offramp.core.cost import HeadCost
from offramp.core.head_spec import ActivationStep, HeadSpec, LinearStep, NormStep, Pooling
from offramp.core.packed import Packed

Pool = Literal["first", "mean", "meanmax", "meanmaxfirst"]
WIDTH: dict[Pool | None, int] = {None: 1, "first": 1, "mean": 1, "meanmax": 2, "meanmaxfirst": 3}  # in hidden sizes


def pool_states(packed: Packed, pool: Pool) -> Tensor:
    """Return one vector for each row."""  # [rows, WIDTH[pool] · hidden]
    if pool == "first":
        return packed.first()
    if pool == "mean":
        return packed.mean()
    own = (packed.first(),) if pool == "meanmaxfirst" else ()
    return torch.cat((packed.mean(), packed.max(), *own), dim=1)


class ExitHead(nn.Module):
    """Pools (rows) or not (tokens), normalises, applies dropout and projects; with `inner` through a hidden layer."""

    def __init__(self, hidden: int, outputs: int, pool: Pool | None, dropout: float = 0.1, inner: int = 0) -> None:
        super().__init__()
        self.pool = pool
        width = WIDTH[pool] * hidden
        self.dense = nn.Linear(hidden, hidden) if pool == "first" else None
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(width, inner) if inner else None
        self.project = nn.Linear(inner or width, outputs)
        macs = linear_macs(self)
        self.cost = HeadCost(0, macs) if pool is None else HeadCost(macs, 0)

    def features(self, packed: Packed) -> Tensor:
        """Return what the norm reads."""  # [rows or tokens, width]
        if self.pool is None:
            states = packed.states
        else:
            states = pool_states(packed, self.pool)
            states = states if self.dense is None else torch.tanh(self.dense(states))
        return states

    def project_features(self, features: Tensor) -> Tensor:
        """Return the logits for features that `features` returned."""
        states = self.dropout(self.norm(features))
        if self.hidden is not None:
            states = self.dropout(F.gelu(self.hidden(states)))
        logits: Tensor = self.project(states)
        return logits

    def spec(self) -> HeadSpec | None:
        """Return the head as plain data; None where it answers per token."""
        if self.pool is None:
            return None
        pooled: dict[Pool, tuple[Pooling, ...]] = {
            "first": ("first",),
            "mean": ("mean",),
            "meanmax": ("mean", "max"),
            "meanmaxfirst": ("mean", "max", "first"),
        }
        dense = () if self.dense is None else (LinearStep(self.dense, "tanh"),)
        hidden = () if self.hidden is None else (LinearStep(self.hidden, "gelu"),)
        return HeadSpec(pooled[self.pool], (*dense, NormStep(self.norm), *hidden, LinearStep(self.project)))

    def forward(self, packed: Packed) -> Tensor:
        """Return logits per row, or per token where `pool` is None."""
        return self.project_features(self.features(packed))


class SharedExitHead(nn.Module):
    """An exit through the model's own head: for heads over a vocabulary, or for a head that was moved to this layer."""

    def __init__(self, apply: Callable[[Packed], Tensor], cost: HeadCost, spec: HeadSpec | None = None) -> None:
        super().__init__()
        self._apply_head, self.cost, self._spec = apply, cost, spec

    def spec(self) -> HeadSpec | None:
        """Return the model's own head as plain data, where its backbone describes it."""
        return self._spec

    def forward(self, packed: Packed) -> Tensor:
        """Return the logits of the model's own head on this layer's states."""
        return self._apply_head(packed)


class MeanMaxHead(nn.Module):
    """Projects the rectified maximum and mean over all tokens: Faster-DAT's head."""

    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        self.dropout, self.project = nn.Dropout(0.1), nn.Linear(2 * hidden, outputs)
        self.cost = HeadCost(linear_macs(self), 0)

    def spec(self) -> HeadSpec:
        """Return the head as plain data."""
        return HeadSpec(("max", "mean"), (ActivationStep("relu"), LinearStep(self.project)))

    def forward(self, packed: Packed) -> Tensor:
        """Return the logits of every row."""
        logits: Tensor = self.project(self.dropout(torch.cat((packed.max(), packed.mean()), dim=1).relu()))
        return logits


class CostOnly(nn.Module):
    """A module without parameters that carries the cost of what a method computes at a layer besides its exits."""

    def __init__(self, compute_cost: Callable[[], HeadCost]) -> None:
        super().__init__()
        self._compute_cost = compute_cost

    @property
    def cost(self) -> HeadCost:
        """MACs; read only when something was computed."""
        return self._compute_cost()
