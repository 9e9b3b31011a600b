"""Lengths: how many of its tokens a row keeps after each layer, and the shortest that a model was trained for.

A length is a share of the row's own number of tokens, never of a padded maximum. Methods that drop tokens to given
lengths and the search for lengths both count by these functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from offramp.nn.keys import TRAINED_LENGTHS
from offramp.nn.network import Network

FEWEST_TOKENS = 2  # that every row keeps, if it has them
CLIFF_SHARE = 0.05  # of a row's tokens are kept after the edge of a cliff


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


class TrainedLengths(nn.Module):
    """The shortest lengths that a model was trained for, stored with it; no search keeps fewer tokens in total.

    `restores` says that dropped tokens return through the predictor of their layer, which costs.
    """

    shares: Tensor  # [layers]

    def __init__(self, shares: Sequence[float], restores: bool = False) -> None:
        super().__init__()
        self.restores = restores
        self.register_buffer("shares", torch.tensor(shares, dtype=torch.float64))


def trained_lengths(network: Network) -> TrainedLengths:
    """Return what a method whose space is a `LengthSpace` stores of its training."""
    trained = network.added[TRAINED_LENGTHS]
    assert isinstance(trained, TrainedLengths), "methods whose space is a LengthSpace store what they were trained for"
    return trained


def shortest_lengths(network: Network) -> tuple[float, ...]:
    """Return the shortest lengths that a model was trained for."""
    return tuple(round(share, 6) for share in trained_lengths(network).shares.tolist())
