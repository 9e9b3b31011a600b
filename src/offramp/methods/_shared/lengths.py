"""What length methods share: which tokens of a row stay, and settings that say how many.

A length is a share of the row's own number of tokens, never of a padded maximum. Who stays is decided by rank among the
row's own tokens; scores are rounded, and of equal ones the earlier token wins, so that the order of sums (another
batch, another engine) turns a tie only where two equal scores stand on a rounding edge.
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

FLOOR = 2  # tokens that every row keeps, if it has them
STEEP = 0.05  # of a row's tokens go on beyond a cliff
FINE = 2.0**16  # scores are rounded to multiples of 1/FINE
MOST = 2**34  # no score times FINE reaches it


def ranks(packed: Packed, scores: Tensor, first: bool) -> Tensor:
    """Each token's place in its row by falling score, 0 the best; with `first` the row's first token leads."""
    level = (scores.detach().double() * FINE).round().long().clamp(0, MOST - 1)  # [tokens]
    if first:
        level = torch.where(packed.tokens[POSITION] == 0, MOST, level)
    return rows.rank_by_row(level, packed)


def best(packed: Packed, scores: Tensor, counts: Tensor, first: bool) -> Tensor:
    """The `counts` [rows] best tokens of each row, as a mask over tokens."""
    return ranks(packed, scores, first) < counts.to(packed.device)[packed.row_of_token]


def counts(lengths: Tensor, share: float) -> Tensor:
    """How many tokens rows of these original lengths keep: the share, rounded up, but two where there are two."""
    kept = torch.ceil(lengths.double() * share - 1e-9).long().clamp(min=FLOOR)
    return torch.minimum(kept, lengths)


def constant(depth: int, drop: float) -> tuple[float, ...]:
    """Shares after each layer when every layer drops the same part of what it got."""
    return tuple(max(1e-6, round((1.0 - drop) ** layer, 6)) for layer in range(1, depth + 1))


def cliffs(least: Sequence[float]) -> list[tuple[float, ...]]:
    """Lengths that keep every token up to a layer and next to none from there on, cheapest first; none with fewer
    tokens in all than `least`. Early layers need the words; later ones read what these have gathered."""
    depth = len(least)
    made = [(1.0,) * edge + (STEEP,) * (depth - edge) for edge in range(1, depth)]
    return [one for one in made if sum(one) >= sum(least)]


def check_falling(name: str, values: Sequence[float]) -> None:
    """Refuse lengths that are no shares, or grow with depth."""
    if any(not 0.0 < value <= 1.0 for value in values):
        fix = "give shares of the row's length, above 0 and at most 1, e.g. 0.8,0.6,0.4"
        raise OfframpError(f"{name} of the layers", _listed(values), fix)
    for layer, (before, after) in enumerate(pairwise(values), start=2):
        if after > before:
            given = f"{_listed(values)}, where layer {layer} would keep more than the layer before it"
            fix = "dropped tokens do not come back: never let a value be above the one before"
            raise OfframpError(f"{name} that fall with depth", given, fix)


def check_depth(name: str, values: Sequence[float], depth: int, otherwise: str) -> None:
    """Refuse lengths for another number of layers; `otherwise` is how to do without saying them."""
    if values and len(values) != depth:
        given = f"{len(values)}: {_listed(values)}"
        fix = f"give one value for each layer, or {otherwise}"
        raise OfframpError(f"{name} for each of {depth} layers", given, fix)


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


@dataclass(frozen=True)
class LengthSettings:
    """After each layer's attention, the share of its original tokens a row keeps; nothing given keeps them all."""

    lengths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_falling("lengths", self.lengths)


class LengthPolicy(policy.Policy):
    """Tokens that received the most attention go on; on row tasks the first token is never dropped."""

    def __init__(self, network: Network, settings: LengthSettings) -> None:
        check_depth("lengths", settings.lengths, network.depth, "find them with `offramp search`")
        self.shares, self.first = (1.0, *settings.lengths), not network.per_token

    def needs(self, layer: int) -> Needs:
        drops = 0 < layer < len(self.shares) and self.shares[layer] < self.shares[layer - 1]
        return Needs(after_attention=drops, scores=drops)

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        if scores is None or not self.needs(layer).scores:
            return None
        original = s.base.lengths[s.packed.rows[ORIGIN].cpu()]
        return best(s.packed, scores.columns, counts(original, self.shares[layer]), self.first)


class Trained(nn.Module):
    """The shortest lengths a model was trained for: no search keeps fewer tokens in all. Travels with the model."""

    shares: Tensor  # [layers]

    def __init__(self, shares: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("shares", torch.tensor(shares, dtype=torch.float64))


def shortest(network: Network) -> tuple[float, ...]:
    """The shortest lengths this model was trained for."""
    trained = network.added["lengths"]
    assert isinstance(trained, Trained), "methods with Lengths for a space keep what they were trained for"
    return tuple(round(share, 6) for share in trained.shares.tolist())
