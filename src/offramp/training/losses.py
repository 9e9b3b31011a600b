"""Losses of exits that several stages share."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp.core.packed import Packed
from offramp.nn.batches import Batch
from offramp.nn.network import Network
from offramp.tasks import IGNORED_TARGET
from offramp.training.distillation import distillation_loss
from offramp.training.forward import LayerStates


def exit_loss(network: Network, layer: int, packed: Packed, batch: Batch) -> Tensor:
    """Return the task's loss of the exit after a layer; where the batch brings a teacher, with that of its logits."""
    targets = batch.targets
    if network.task.outputs == 0:  # logits over a vocabulary are computed only where there is a target
        labelled = (targets != IGNORED_TARGET).nonzero().squeeze(1)
        packed = Packed(packed.states.index_select(0, labelled), torch.tensor([labelled.shape[0]]))
        targets = targets.index_select(0, labelled)
    logits = network(layer, packed)
    loss = network.task.loss(logits, targets, packed.lengths.to(logits.device))
    return loss if batch.teacher is None else loss + distillation_loss(network, logits, batch.teacher, packed)


def exit_losses(network: Network, states: LayerStates, batch: Batch, layers: list[int]) -> Tensor:
    """Return the task's loss of the exit after each of these layers."""  # [exits]
    return torch.stack([exit_loss(network, layer, states.after(layer), batch) for layer in layers])


def detached_exit0_loss(network: Network, states: LayerStates, batch: Batch) -> Tensor:
    """Return the task's loss of the exit on the embeddings, for that exit's head alone; 0 where there is none.

    No paper has this exit, so methods that train exits with the model must be the same model with and without it. Then
    it can also be closed in calibration instead of training a second time.
    """
    packed = states.after(0)
    if 0 not in network.exit_heads:
        return packed.states.new_zeros((), dtype=torch.float32)
    return exit_loss(network, 0, packed.with_states(packed.states.detach()), batch)


def last_exit_loss(network: Network, states: LayerStates, batch: Batch) -> Tensor:
    """Return the task's loss of the full model: the objective where no depth method brings its own."""
    return exit_loss(network, network.depth, states.after(network.depth), batch)
