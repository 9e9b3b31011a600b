"""What length methods share: which tokens of a row are kept, and settings that say how many.

A length is a share of the row's own number of tokens, never of a padded maximum. Tokens are kept by rank among the
row's own tokens. Scores are rounded, and of equal scores the earlier token has the better rank, so that another order
of summation (another batch, another engine) changes a rank only where two equal scores lie on a rounding edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from offramp.core import policy
from offramp.core.attention import AttentionScores
from offramp.core.columns import ORIGIN, POSITION
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Needs
from offramp.errors import OfframpError
from offramp.nn import row_ops as rows
from offramp.nn.network import Network

TRAINED_LENGTHS = "lengths"  # key of a method's module in Network.added
FEWEST_TOKENS = 2  # that every row keeps, if it has them
CLIFF_SHARE = 0.05  # of a row's tokens are kept after the edge of a cliff
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


def kept_counts(lengths: Tensor, share: float) -> Tensor:
    """Return how many tokens rows of these original lengths keep: the share, rounded up, at least two of two."""
    kept = torch.ceil(lengths.double() * share - 1e-9).long().clamp(min=FEWEST_TOKENS)
    return torch.minimum(kept, lengths)


def constant_drop(depth: int, drop: float) -> tuple[float, ...]:
    """Return the shares after each layer when every layer drops the same part of its tokens."""
    return tuple(max(1e-6, round((1.0 - drop) ** layer, 6)) for layer in range(1, depth + 1))


def cliffs(least: Sequence[float]) -> list[tuple[float, ...]]:
    """Return lengths that keep every token up to a layer and almost none after it, cheapest first; none with fewer
    tokens in total than `least`. Early layers need the words; later ones read what these have gathered."""
    depth = len(least)
    found = [(1.0,) * edge + (CLIFF_SHARE,) * (depth - edge) for edge in range(1, depth)]
    return [lengths for lengths in found if sum(lengths) >= sum(least)]


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


class TrainedLengths(nn.Module):
    """The shortest lengths that a model was trained for, stored with it; no search keeps fewer tokens in total."""

    shares: Tensor  # [layers]

    def __init__(self, shares: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("shares", torch.tensor(shares, dtype=torch.float64))


def shortest_lengths(network: Network) -> tuple[float, ...]:
    """Return the shortest lengths that a model was trained for."""
    trained = network.added[TRAINED_LENGTHS]
    assert isinstance(trained, TrainedLengths), "methods whose space is a LengthSpace store what they were trained for"
    return tuple(round(share, 6) for share in trained.shares.tolist())
