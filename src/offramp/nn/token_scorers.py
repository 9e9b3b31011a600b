"""Small networks that score how much a token matters; methods add them as predictors, by layer."""

from __future__ import annotations

from torch import Tensor, nn

from offramp.backbones import linear_macs
from offramp.core.cost import HeadCost
from offramp.core.packed import Packed
from offramp.nn.row_ops import log_softmax_by_row

WIDTH = 32


class TokenScorer(nn.Module):
    """Two linear layers from a token's state to one logit."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(hidden, WIDTH), nn.Linear(WIDTH, 1)
        self.cost = HeadCost(0, linear_macs(self))

    def forward(self, states: Tensor) -> Tensor:
        """Return a logit for each token."""  # [tokens, hidden] → [tokens]
        logits: Tensor = self.outer(nn.functional.gelu(self.inner(states))).squeeze(-1)
        return logits.float()


def token_shares(logits: Tensor, packed: Packed) -> Tensor:
    """Return the softmax of a scorer's logits over the tokens that are left in each row."""  # [tokens]
    return log_softmax_by_row(logits, packed).exp()
