"""Layers of which only some heads and neurons are computed.

A pruned head or neuron has zeros where it is projected back into the stream, so a layer that leaves it out gives the
same states for less work. Parameters stay whole and where they are; what is computed is cut from them, once while
nothing changes, anew in every step of training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from offramp.core.cost import LayerCost

Self = TypeVar("Self", bound="Narrowing")


class Narrowing(ABC):
    """The base of layers that can be narrowed."""

    cost: LayerCost
    heads: int  # that are computed

    def __init__(self) -> None:
        self.columns: Tensor | None = None  # those of the heads that are computed; None: all
        self.neurons: Tensor | None = None
        self._whole: LayerCost | None = None
        self._cuts: dict[str, tuple[tuple[int, int], Tensor]] = {}

    @abstractmethod
    def outputs(self) -> tuple[nn.Linear, nn.Linear]:
        """The projections back into the stream: of attention (heads own equal shares of its inputs, in order) and of
        the feed-forward half (a neuron owns one input)."""

    def narrow(self, heads: Tensor, neurons: Tensor) -> None:
        """Compute only these, given as masks; at least one of each."""
        wide = self.outputs()[0].in_features // len(heads)
        self.heads = int(heads.sum())
        self.columns = None if bool(heads.all()) else heads.repeat_interleave(wide).nonzero().squeeze(1)
        self.neurons = None if bool(neurons.all()) else neurons.nonzero().squeeze(1)
        whole = self._whole = self._whole or self.cost
        left, fed = self.heads / len(heads), float(neurons.float().mean())
        self.cost = LayerCost(whole.query * left, whole.key * left, whole.pair * left, whole.feed * fed)

    def uncut(self: Self) -> Self:
        """The same layer at its price before it was narrowed."""
        twin = copy(self)
        twin.cost = self._whole or self.cost
        return twin

    def cut(self, name: str, source: Tensor, index: Tensor | None, dim: int) -> Tensor:
        """The part of a parameter that is computed; kept under a name while no gradient is recorded."""
        if index is None:
            return source
        if torch.is_grad_enabled():
            return source.index_select(dim, index.to(source.device))
        stamp = (source.data_ptr(), source._version)
        if name not in self._cuts or self._cuts[name][0] != stamp:
            with torch.inference_mode(False), torch.no_grad():  # a tensor that others may ask for its version
                self._cuts[name] = stamp, source.index_select(dim, index.to(source.device)).contiguous()
        return self._cuts[name][1]

    def _rows(self, name: str, linear: nn.Linear, index: Tensor | None, blocks: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a matrix that is several stacked ones, the same rows of each."""
        if index is not None:
            index = torch.cat([index + block * (linear.out_features // blocks) for block in range(blocks)])
        bias = None if linear.bias is None else self.cut(f"{name} bias", linear.bias, index, 0)
        return self.cut(f"{name} weight", linear.weight, index, 0), bias
