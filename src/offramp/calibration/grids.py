"""Grids of settings for methods that must run again for every setting.

For lengths: the same share of tokens dropped at every layer, evenly spread in cost, and cliffs, which keep every token
through the first layers and few after them. The cost of lengths follows from the rows' own lengths, so none of this
runs the model. For a single number: values between those of a grid, where the steps are widest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from offramp.core.cost import Event, macs
from offramp.inference.operating_points import OperatingPoint
from offramp.nn.lengths import cliffs, constant_drop, kept_counts, shortest_lengths, trained_lengths
from offramp.nn.network import Network

EXTRA_RUNS = 4  # settings added to a grid
USEFUL_LOSS = 0.05  # a step that begins further below the full setting's score is not worth refining
SMALLEST_STEP = 1e-4  # compute × score: a hundredth of each


def length_macs(network: Network, shares: Sequence[float], lengths: Tensor) -> Tensor:
    """Return the MACs of rows of these lengths that keep such shares of their tokens after each layer's attention."""
    rows, before = torch.arange(lengths.shape[0]), lengths
    restores = trained_lengths(network).restores
    trace = [Event("embed", 0, rows, lengths, lengths)]
    for layer in range(1, network.depth + 1):
        after = torch.minimum(before, kept_counts(lengths, shares[layer - 1])) if shares else before
        trace += [Event("attend", layer, rows, before, before), Event("feed", layer, rows, after, after)]
        if restores:
            trace.append(Event("predictor", layer, rows, before - after, before - after))
        before = after
    tokens = lengths if network.per_token else before
    return macs([*trace, Event("head", network.depth, rows, tokens, tokens)], network, lengths.shape[0])  # [rows]


def kept_tokens(shares: Sequence[float], lengths: Tensor) -> int:
    """Return how many tokens rows of these lengths keep, summed over rows and layers."""
    return sum(int(kept_counts(lengths, share).sum()) for share in shares)


def constant_length_grid(network: Network, lengths: Tensor, count: int) -> list[tuple[float, ...]]:
    """Return the shortest lengths the model was trained for and `count` longer ones, cheapest first.

    The setting that keeps all tokens is not among them.
    """
    smallest = shortest_lengths(network)
    largest_drop = 1.0 - smallest[0]

    def cost(drop: float) -> float:
        return float(length_macs(network, constant_drop(network.depth, drop), lengths).sum())

    low, high = cost(largest_drop), cost(0.0)
    targets = [low + (high - low) * step / (count + 1) for step in range(1, count + 1)]
    grid = [smallest, *(constant_drop(network.depth, _drop_for(cost, target, largest_drop)) for target in targets)]
    return list(dict.fromkeys(grid))


def cliff_lengths(network: Network, count: int) -> list[tuple[float, ...]]:
    """Return at most `count` cliffs, evenly spread over the layers, none shorter than the model was trained for."""
    known = cliffs(shortest_lengths(network))
    places = torch.linspace(0, len(known) - 1, min(count, len(known))).round().int().tolist()
    return [known[place] for place in places]


def _drop_for(cost: Callable[[float], float], target: float, largest_drop: float) -> float:
    """Return the constant drop that costs about `target`, by bisection: cost falls as the drop grows."""
    low, high = 0.0, largest_drop
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) > target else (low, middle)
    return high


def refine_grid(
    name: str,
    grid: Sequence[OperatingPoint],
    full_point: OperatingPoint,
    evaluate: Callable[[dict[str, Any]], OperatingPoint],
) -> list[OperatingPoint]:
    """Return points in the middle of the widest steps of a grid over the setting `name`.

    The width of a step is the difference in compute times the difference in score of its two ends.
    """
    points = sorted([*grid, full_point], key=lambda point: float(point.settings[name]))
    added: list[OperatingPoint] = []

    def width(step: tuple[OperatingPoint, OperatingPoint]) -> float:
        first, second = step
        costlier = max(step, key=lambda point: point.mac_share)
        if abs(full_point.score - costlier.score) > USEFUL_LOSS:
            return 0.0
        return abs(first.mac_share - second.mac_share) * abs(first.score - second.score)

    while len(added) < EXTRA_RUNS:
        first, second = max(pairwise(points), key=width)
        if width((first, second)) < SMALLEST_STEP:
            break
        added.append(evaluate({name: (first.settings[name] + second.settings[name]) / 2}))
        points.insert(points.index(second), added[-1])
    return added
