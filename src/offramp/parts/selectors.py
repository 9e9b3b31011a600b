"""Small networks that look at a token and say how much it matters; they live in `added` under `extra`, by layer."""

from __future__ import annotations

from torch import Tensor, nn

from offramp.backbones import linear_macs
from offramp.core.cost import HeadCost
from offramp.core.packed import Packed
from offramp.parts import rows
from offramp.parts.network import Network

WIDTH = 32


class Selector(nn.Module):
    """State → one number."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(hidden, WIDTH), nn.Linear(WIDTH, 1)
        self.cost = HeadCost(0, linear_macs(self))

    def forward(self, states: Tensor) -> Tensor:
        """A logit per token."""  # [tokens, hidden] → [tokens]
        said: Tensor = self.outer(nn.functional.gelu(self.inner(states))).squeeze(-1)
        return said.float()


def say(network: Network, layer: int, packed: Packed) -> Tensor:
    """What the selector before a layer says of the states that enter it."""  # [tokens]
    said: Tensor = network.added["extra"][str(layer)](network.encoder.final(packed.states))  # type: ignore[index]
    return said


def contributions(network: Network, layer: int, packed: Packed) -> Tensor:
    """The share of each token among those left, as the predictor before a layer sees it."""  # [tokens]
    return rows.log_softmax(say(network, layer, packed), packed).exp()
