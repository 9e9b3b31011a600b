"""AdapLeR's soft removal: tokens fade from attention while training, the more decidedly the sharper the mask.

In the limit of a sharp mask it is the run-time rule: a token goes on if its predicted share is at least η/n.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offramp.core.packed import Packed
from offramp.nn import row_ops as rows
from offramp.nn.network import Network
from offramp.training.forward import Trace

BETA = 0.1  # slope of the soft mask above the threshold, times λ
FAINTEST = -10_000.0


@dataclass
class Fading:
    """The soft counterpart of `Policy`: an additive attention mask that grows with depth. One object a pass."""

    network: Network
    eta: Tensor  # [layers]
    dummy: Tensor  # [layers − 1], ones: takes the gradient of the amplifiers
    sharpness: float
    mask: Tensor = field(init=False)  # [tokens] ≤ 0, log of how present a token is
    shares: list[Tensor] = field(default_factory=list)  # log of the predicted share, a layer each
    before: list[Tensor] = field(default_factory=list)  # the mask that each layer's predictor found
    lengths: list[Tensor] = field(default_factory=list)  # [rows] tokens left in each layer

    def enter(self, layer: int, made: Trace) -> Tensor:
        """The attention mask of a layer, called once a layer and in order."""  # [tokens]
        packed = made.at(layer - 1)
        if layer == 1:
            self.mask = torch.zeros(packed.total, device=packed.device)
        first = rows.first(packed)
        logits = self.network.predictor(layer, packed) + self.mask
        if layer > 1:
            logits = logits + first * self.dummy[layer - 2].log()
        share = rows.log_softmax(logits, packed)
        present = self.mask.exp()
        limit = (self.eta[layer - 1] / rows.total(present, packed))[packed.row_of_token]
        edit = fade(share.exp(), limit, self.sharpness) * present
        self.shares.append(share)
        self.before.append(self.mask)
        self.mask = self.mask + edit.masked_fill(first, 0.0)
        made.present[layer] = self.mask.exp()
        self.lengths.append(rows.total(made.present[layer], packed))
        return self.mask

    def gate(self, layer: int, made: Trace) -> Tensor | None:
        """Where every token has an answer, those that left keep their state."""
        self.enter(layer, made)
        return made.present[layer] if self.network.per_token else None

    def predictor_loss(self, saliency: Tensor, theta: Tensor, packed: Packed) -> Tensor:
        """Σ (L − l)·KL(saliency of the tokens left ‖ predicted shares), averaged over rows."""
        raw, first, losses = saliency.clamp(min=1e-20).log(), rows.first(packed), []
        for layer, (share, mask) in enumerate(zip(self.shares, self.before, strict=True)):
            wanted = raw + mask.detach() + (first * theta[layer - 1].log() if layer else 0.0)
            wanted = rows.log_softmax(wanted, packed)
            losses.append((len(self.shares) - layer) * (wanted.exp() * (wanted - share)).sum() / packed.count)
        return torch.stack(losses).sum()


def fade(share: Tensor, limit: Tensor, sharpness: float) -> Tensor:
    """What is added to the log-presence of tokens: next to nothing above the limit, steeply falling below it."""
    below = sharpness / limit * (share - limit) - BETA / sharpness
    above = (share - 1.0) * BETA / (sharpness * (1.0 - limit).clamp(min=1e-6))
    return torch.minimum(below, above).clamp(FAINTEST, 0.0)
