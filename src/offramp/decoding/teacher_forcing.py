"""Teacher forcing: the decoder reads the reference translation, and every target token is computed at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offramp.core.packed import Packed
from offramp.decoding.decoder import decoder_of, generation_rules, pad_packed
from offramp.nn.batches import Batch
from offramp.nn.network import Network
from offramp.tasks import IGNORED_TARGET
from offramp.training.forward import forward_all_layers


@dataclass(frozen=True)
class TeacherForced:
    """The target tokens of a batch under teacher forcing, packed, after every block."""

    source: Packed  # encoder states
    states: list[Tensor]  # after each block 1…N: [tokens, hidden]
    targets: Tensor  # [tokens]
    lengths: Tensor  # [rows] target tokens, on the CPU

    def detached(self) -> TeacherForced:
        """Return the same states without gradients."""
        source = self.source.with_states(self.source.states.detach())
        return TeacherForced(source, [states.detach() for states in self.states], self.targets, self.lengths)


def encode_source(network: Network, batch: Batch) -> Packed:
    """Return the encoder states of a batch; several passes of the decoder may share them."""
    encoded = forward_all_layers(network.encoder, batch.packed)
    return encoded.packed.with_states(network.encoder.final(encoded.states[-1]))


def teacher_force(network: Network, batch: Batch, source: Packed, exit_block: Tensor | None = None) -> TeacherForced:
    """Run all target tokens through all blocks.

    With `exit_block` [rows, longest], a token is computed up to that block; the blocks above see its state unchanged
    and take its keys and values from it.
    """
    decoder, targets = decoder_of(network), batch.targets
    real = targets != IGNORED_TARGET
    start = torch.full_like(targets[:, :1], generation_rules(network).start)
    inputs = torch.cat((start, targets[:, :-1]), dim=1).clamp(min=0)
    x = decoder.embed(inputs, torch.arange(targets.shape[1], device=targets.device))
    padded_source, mask = pad_packed(source, source.states)
    states = []
    for number, block in enumerate(decoder.blocks, 1):
        x = block(x, padded_source, mask, None if exit_block is None else exit_block >= number)
        states.append(x[real])
    return TeacherForced(source, states, targets[real], real.sum(1).cpu())
