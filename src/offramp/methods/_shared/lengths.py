"""What length methods share: which tokens of a row are kept, and settings that say how many (`nn/lengths.py`).

Tokens are kept by rank among the row's own tokens. Scores are rounded, and of equal scores the earlier token has the
better rank, so that another order of summation (another batch, another engine) changes a rank only where two equal
scores lie on a rounding edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from offramp.core import policy
from offramp.core.attention import AttentionScores
from offramp.core.columns import ORIGIN, POSITION
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Needs
from offramp.errors import OfframpError
from offramp.nn import row_ops as rows
from offramp.nn.lengths import kept_counts
from offramp.nn.network import Network

RESOLUTION = 2.0**16  # scores are rounded to multiples of 1/RESOLUTION
ABOVE_ALL_SCORES = 2**34  # no score times RESOLUTION reaches it


def token_ranks(packed: Packed, scores: Tensor, first: bool) -> Tensor:
    """Return each token's rank in its row by falling score, from 0; with `first` the row's first token is first."""
    level = (scores.detach().double() * RESOLUTION).round().long().clamp(0, ABOVE_ALL_SCORES - 1)  # [tokens]
    if first:
        level = torch.where(packed.tokens[POSITION] == 0, ABOVE_ALL_SCORES, level)
    return rows.rank_by_row(level, packed)


def best_tokens(packed: Packed, scores: Tensor, counts: Tensor, first: bool) -> Tensor:
    """Return the `counts` [rows] best tokens of each row, as a mask over tokens."""
    return token_ranks(packed, scores, first) < counts.to(packed.device)[packed.row_of_token]


def check_falling(name: str, values: Sequence[float]) -> None:
    """Refuse lengths that are no shares, or that grow with depth."""
    if any(not 0.0 < value <= 1.0 for value in values):
        fix = "give shares of the row's length, above 0 and at most 1, e.g. 0.8,0.6,0.4"
        raise OfframpError(f"{name} of the layers", _listed(values), fix)
    for layer, (before, after) in enumerate(pairwise(values), start=2):
        if after > before:
            given = f"{_listed(values)}, where layer {layer} would keep more than the layer before it"
            fix = "dropped tokens do not return: give no value that is larger than the one before"
            raise OfframpError(f"{name} that fall with depth", given, fix)


def check_depth(name: str, values: Sequence[float], depth: int, otherwise: str) -> None:
    """Refuse lengths for another number of layers; `otherwise` says how to do without giving them."""
    if values and len(values) != depth:
        given = f"{len(values)}: {_listed(values)}"
        fix = f"give one value for each layer, or {otherwise}"
        raise OfframpError(f"{name} for each of {depth} layers", given, fix)


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


@dataclass(frozen=True)
class LengthSettings:
    """The share of its original tokens that a row keeps after each layer's attention; none given keeps them all."""

    lengths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_falling("lengths", self.lengths)


class LengthPolicy(policy.Policy):
    """Keeps the tokens that received the most attention; on row tasks the first token is never dropped."""

    def __init__(self, network: Network, settings: LengthSettings) -> None:
        check_depth("lengths", settings.lengths, network.depth, "find them with `offramp calibrate --search`")
        self.shares, self.first = (1.0, *settings.lengths), not network.per_token

    def needs(self, layer: int) -> Needs:
        drops = 0 < layer < len(self.shares) and self.shares[layer] < self.shares[layer - 1]
        return Needs(after_attention=drops, scores=drops)

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        if scores is None or not self.needs(layer).scores:
            return None
        original = s.base.lengths[s.packed.rows[ORIGIN].cpu()]
        return best_tokens(s.packed, scores.columns, kept_counts(original, self.shares[layer]), self.first)
