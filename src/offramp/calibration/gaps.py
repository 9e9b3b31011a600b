"""Settings between those of a grid: where every setting means another pass, a few more go to the widest steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from offramp.calibration.subject import Settings
from offramp.inference.operating_points import OperatingPoint

PASSES = 4
WORTH = 0.05  # steps that begin further below the loosest setting's score are nobody's choice
LEAST = 1e-4  # a hundredth of the compute for a hundredth of the score


def refine_grid(
    name: str, grid: Sequence[OperatingPoint], loosest: OperatingPoint, point: Callable[[Settings], OperatingPoint]
) -> list[OperatingPoint]:
    """Points in the middle of the widest steps of a ladder: those with the most compute and score between two rungs."""
    rungs, made = sorted([*grid, loosest], key=lambda p: float(p.settings[name])), list[OperatingPoint]()

    def width(step: tuple[OperatingPoint, OperatingPoint]) -> float:
        dearer = max(step, key=lambda p: p.mac_share)
        if abs(loosest.score - dearer.score) > WORTH:
            return 0.0
        one, other = step
        return abs(one.mac_share - other.mac_share) * abs(one.score - other.score)

    while len(made) < PASSES:
        one, other = max(pairwise(rungs), key=width)
        if width((one, other)) < LEAST:
            break
        made.append(point({name: (one.settings[name] + other.settings[name]) / 2}))
        rungs.insert(rungs.index(other), made[-1])
    return made
