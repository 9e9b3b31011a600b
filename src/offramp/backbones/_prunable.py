"""Layers of which only some heads and neurons are computed.

The output projection of a pruned head or neuron is zero, so a layer that leaves it out gives the same states for less
work. The parameters keep their shape. The part that is computed is cut from them: once while they do not change, and
anew in every step of training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from offramp.core.cost import LayerCost

Self = TypeVar("Self", bound="PrunableLayer")


class PrunableLayer(ABC):
    """The base of layers whose heads and neurons can be pruned."""

    cost: LayerCost
    heads: int  # that are computed

    def __init__(self) -> None:
        self.columns: Tensor | None = None  # features of the heads that are computed; None: all
        self.neurons: Tensor | None = None  # feed-forward neurons that are computed; None: all
        self._full_cost: LayerCost | None = None
        self._kept: dict[str, tuple[tuple[int, int], Tensor]] = {}  # name → stamp of the parameter, its kept part

    @abstractmethod
    def output_projections(self) -> tuple[nn.Linear, nn.Linear]:
        """Return the output projections of attention and of the feed-forward half.

        Each head owns an equal share of the inputs of the first, in order; each neuron owns one input of the second.
        """

    def prune(self, heads: Tensor, neurons: Tensor) -> None:
        """Compute only these heads and neurons, given as masks; at least one of each."""
        width = self.output_projections()[0].in_features // len(heads)
        self.heads = int(heads.sum())
        self.columns = None if bool(heads.all()) else heads.repeat_interleave(width).nonzero().squeeze(1)
        self.neurons = None if bool(neurons.all()) else neurons.nonzero().squeeze(1)
        full = self._full_cost = self._full_cost or self.cost
        head_share, neuron_share = self.heads / len(heads), float(neurons.float().mean())
        attention = (full.query * head_share, full.key * head_share, full.pair * head_share)
        self.cost = LayerCost(*attention, full.feed * neuron_share)

    def at_full_cost(self: Self) -> Self:
        """Return the same layer with its cost before pruning."""
        copied = copy(self)
        copied.cost = self._full_cost or self.cost
        return copied

    def kept_part(self, name: str, parameter: Tensor, index: Tensor | None, dim: int) -> Tensor:
        """Return the part of a parameter that is computed; it is cached under `name` while no gradient is recorded."""
        if index is None:
            return parameter
        if torch.is_grad_enabled():
            return parameter.index_select(dim, index.to(parameter.device))
        stamp = (parameter.data_ptr(), parameter._version)
        if name not in self._kept or self._kept[name][0] != stamp:
            with torch.inference_mode(False), torch.no_grad():  # inference tensors have no version counter
                self._kept[name] = stamp, parameter.index_select(dim, index.to(parameter.device)).contiguous()
        return self._kept[name][1]

    def kept_rows(self, name: str, linear: nn.Linear, index: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of a linear layer that stacks `count` matrices, the same rows of each."""
        if index is not None:
            index = torch.cat([index + block * (linear.out_features // count) for block in range(count)])
        bias = None if linear.bias is None else self.kept_part(f"{name} bias", linear.bias, index, 0)
        return self.kept_part(f"{name} weight", linear.weight, index, 0), bias
