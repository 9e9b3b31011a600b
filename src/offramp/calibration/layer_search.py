"""A value of its own for every layer, where a method's settings cannot be replayed.

One number for all layers (AdapLeR's scale) treats layers alike that are not. A small evolutionary search starts from a
few such numbers and changes one layer, or all layers from one on; each trial is a real run, so there are few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from offramp.inference.operating_points import OperatingPoint, pareto_front

RUNS = 24  # vectors tried beside the starting ones
STARTS, KEPT = 4, 6  # numbers to start from; vectors that are returned
FACTORS = (0.0, 0.5, 0.75, 1.33, 2.0)
Values = tuple[float, ...]  # one per layer


def search_layer_values(
    evaluate: Callable[[Values], OperatingPoint],
    starts: Sequence[float],
    layers: int,
    full_point: OperatingPoint,
    useful_loss: float,
    higher_is_better: bool = True,
) -> list[Values]:
    """Return vectors of the front of cost and score that no single number gives, cheapest first, at most `KEPT`.

    Parents are vectors of the front that lose at most `useful_loss` against the full setting's point.
    """
    rng, sign = np.random.default_rng(0), 1.0 if higher_is_better else -1.0
    tried = {(value,) * layers: evaluate((value,) * layers) for value in starts}
    for _ in range(RUNS):
        parents = _front(tried, full_point, higher_is_better)
        useful = [one for one in parents if sign * (full_point.score - tried[one].score) <= useful_loss]
        if not useful:
            return []
        child = _child(useful[int(rng.integers(len(useful)))], rng)
        if child not in tried and any(child):
            tried[child] = evaluate(child)
    found = [one for one in _front(tried, full_point, higher_is_better) if len(set(one)) > 1]
    places = {round(place) for place in np.linspace(0, len(found) - 1, min(KEPT, len(found)))}
    return [found[place] for place in sorted(places)]


def _front(tried: dict[Values, OperatingPoint], full_point: OperatingPoint, higher_is_better: bool) -> list[Values]:
    points = pareto_front(list(tried.values()), full_point, higher_is_better)
    values = {id(point): one for one, point in tried.items()}
    return [values[id(point)] for point in points if id(point) in values]


def _child(parent: Values, rng: np.random.Generator) -> Values:
    """Return the values with one layer, or all layers from one on, multiplied; a value of 0 is set to the largest."""
    layer, factor = int(rng.integers(len(parent))), float(rng.choice(FACTORS))
    last = len(parent) if rng.random() < 0.5 else layer + 1
    changed = [(value or max(parent)) * factor if layer <= n < last else value for n, value in enumerate(parent)]
    return tuple(round(value, 4) for value in changed)
