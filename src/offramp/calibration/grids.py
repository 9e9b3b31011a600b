"""Where a search over lengths begins, or a quick curve: the same part dropped at every layer, evenly spread in cost,
and cliffs, which keep every token through the first layers.

What lengths cost follows from the rows' own lengths alone, so none of this runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offramp.core.cost import Event, macs
from offramp.methods._shared.lengths import cliffs, constant, counts, shortest
from offramp.nn.network import Network


def length_macs(network: Network, shares: Sequence[float], lengths: Tensor) -> Tensor:
    """MACs of rows of these lengths that keep such shares of their tokens after each layer's attention."""  # [rows]
    rows, before = torch.arange(lengths.shape[0]), lengths
    log = [Event("embed", 0, rows, lengths, lengths)]
    for layer in range(1, network.depth + 1):
        after = torch.minimum(before, counts(lengths, shares[layer - 1])) if shares else before
        log += [Event("attend", layer, rows, before, before), Event("feed", layer, rows, after, after)]
        before = after
    seen = lengths if network.per_token else before
    return macs([*log, Event("head", network.depth, rows, seen, seen)], network, lengths.shape[0])


def kept_tokens(shares: Sequence[float], lengths: Tensor) -> int:
    """How many tokens rows of these lengths keep after all layers together."""
    return sum(int(counts(lengths, share).sum()) for share in shares)


def constant_length_grid(network: Network, lengths: Tensor, count: int) -> list[tuple[float, ...]]:
    """The shortest lengths the model was trained for and `count` longer ones, cheapest first; all tokens left out."""
    smallest = shortest(network)
    most = 1.0 - smallest[0]

    def cost(drop: float) -> float:
        return float(length_macs(network, constant(network.depth, drop), lengths).sum())

    low, high = cost(most), cost(0.0)
    targets = [low + (high - low) * step / (count + 1) for step in range(1, count + 1)]
    made = [smallest, *(constant(network.depth, _drop_for(cost, target, most)) for target in targets)]
    return list(dict.fromkeys(made))


def cliff_lengths(network: Network, count: int) -> list[tuple[float, ...]]:
    """Cliffs no shorter in all than what the model was trained for: `count` at most, their layers evenly spread."""
    known = cliffs(shortest(network))
    places = torch.linspace(0, len(known) - 1, min(count, len(known))).round().int().tolist()
    return [known[place] for place in places]


def _drop_for(cost: Callable[[float], float], target: float, most: float) -> float:
    """The constant drop that costs about this much; cost falls as the drop grows."""
    low, high = 0.0, most
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) > target else (low, middle)
    return high
