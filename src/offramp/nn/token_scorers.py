"""Small networks that look at a token and say how much it matters; they live in `added` under `extra`, by layer."""

from __future__ import annotations

from torch import Tensor, nn

from offramp.backbones import linear_macs
from offramp.core.cost import HeadCost
from offramp.core.packed import Packed
from offramp.nn import row_ops as rows

WIDTH = 32


class TokenScorer(nn.Module):
    """State → one number."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(hidden, WIDTH), nn.Linear(WIDTH, 1)
        self.cost = HeadCost(0, linear_macs(self))

    def forward(self, states: Tensor) -> Tensor:
        """A logit per token."""  # [tokens, hidden] → [tokens]
        said: Tensor = self.outer(nn.functional.gelu(self.inner(states))).squeeze(-1)
        return said.float()


def token_shares(said: Tensor, packed: Packed) -> Tensor:
    """The share of each token among those left, by what a predictor says of them."""  # [tokens]
    return rows.log_softmax_by_row(said, packed).exp()
