"""Operating points: from a budget to settings.

`budget=b` is the most accurate point whose expected share of the full model's MACs is at most b, else the cheapest;
`budget=1.0` is the loosest setting; no budget is the cheapest point within 0.5 points of the loosest on dev rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offramp.errors import OfframpError
from offramp.model.files import read_json, write_json

TOLERANCE = 0.005


@dataclass(frozen=True)
class Point:
    """One setting and what it did on the calibration rows."""

    settings: dict[str, Any]
    mac_share: float
    score: float  # the task's metric
    mean_exit_layer: float


@dataclass(frozen=True)
class Points:
    """All useful settings of a model, cheapest first; the last is the loosest."""

    metric: str
    higher_is_better: bool
    data: dict[str, Any]  # name, rows, fingerprint
    points: tuple[Point, ...]

    def better(self, a: float, b: float) -> bool:
        """Whether score `a` beats score `b`."""
        return a > b if self.higher_is_better else a < b

    @property
    def loosest(self) -> Point:
        """The full model's own point."""
        return self.points[-1]

    def choose(self, budget: float | None) -> Point:
        """The point for a budget."""
        if budget is None:
            return next(p for p in self.points if self._lost(p) <= TOLERANCE + 1e-9)
        check_budget(budget)
        if budget >= 1.0:
            return self.loosest
        fitting = [p for p in self.points if p.mac_share <= budget]
        if not fitting:
            cheapest = self.points[0]
            warnings.warn(
                f"no point within budget {budget}: using the cheapest, {cheapest.mac_share:.3f} of the full compute",
                stacklevel=2,
            )
            return cheapest
        best = fitting[0]
        for point in fitting[1:]:
            best = point if self.better(point.score, best.score) else best
        return best

    def _lost(self, point: Point) -> float:
        lost = self.loosest.score - point.score
        return lost if self.higher_is_better else -lost / max(abs(self.loosest.score), 1e-9)


def check_budget(budget: float) -> None:
    """A budget is a share of the full model's compute."""
    if not 0.0 < budget <= 1.0:
        raise OfframpError(
            "a budget, the share of the full model's compute",
            f"budget={budget}",
            "give a number above 0 and at most 1, e.g. 0.5",
        )


def pareto(points: Sequence[Point], loosest: Point, higher_is_better: bool) -> tuple[Point, ...]:
    """The points that no other beats on both cost and score, cheapest first, the loosest always last."""
    sign = 1.0 if higher_is_better else -1.0
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.mac_share, -sign * p.score)):
        if not kept or sign * point.score > sign * kept[-1].score:
            kept.append(point)
    # a point dearer than the full model (heads that never fire) is of no use to anybody
    return (*[p for p in kept if p.mac_share < loosest.mac_share], loosest)


def save(folder: Path, points: Points) -> None:
    """Write points.json."""
    write_json(folder / "points.json", asdict(points))


def load(folder: Path) -> Points:
    """Read points.json."""
    raw = read_json(folder / "points.json")
    try:
        first, *others = (Point(**point) for point in raw["points"])
        return Points(raw["metric"], raw["higher_is_better"], raw["data"], (first, *others))
    except (KeyError, TypeError, ValueError) as error:
        raise OfframpError(
            "operating points", f"a damaged points.json in {folder}", "calibrate or train again"
        ) from error
