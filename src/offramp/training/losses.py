"""Losses at exits, shared by stages."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp.core.packed import Packed
from offramp.nn.batches import Batch
from offramp.nn.network import Network
from offramp.training.forward import LayerStates

IGNORED_TARGET = -100  # the target of tokens without a label


def exit_loss(network: Network, layer: int, packed: Packed, batch: Batch) -> Tensor:
    """The task's loss of the answer after a layer."""
    targets = batch.targets
    if network.task.outputs == 0:  # a vocabulary: answer only where somebody asks
        asked = (targets != IGNORED_TARGET).nonzero().squeeze(1)
        packed = Packed(packed.states.index_select(0, asked), torch.tensor([asked.shape[0]]))
        targets = targets.index_select(0, asked)
    logits = network(layer, packed)
    return network.task.loss(logits, targets, packed.lengths.to(logits.device))


def exit_losses(network: Network, trace: LayerStates, batch: Batch, layers: list[int]) -> Tensor:
    """The task's loss of each exit."""  # [exits]
    return torch.stack([exit_loss(network, layer, trace.after(layer), batch) for layer in layers])


def last_exit_loss(network: Network, trace: LayerStates, batch: Batch) -> Tensor:
    """The task's loss of the full model's answer: the objective where no depth method brings its own."""
    return exit_loss(network, network.depth, trace.after(network.depth), batch)
