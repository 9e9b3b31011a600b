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
class Guarantee:
    """Settings and what was proven about them: with `confidence`, at most `risk` departure from the full model."""

    risk: float
    confidence: float
    settings: dict[str, Any]
    rows: int  # that it was tested on
    found: float  # the mean loss on those rows
    mac_share: float


@dataclass(frozen=True)
class Points:
    """All useful settings of a model, cheapest first; the last is the loosest."""

    metric: str
    higher_is_better: bool
    data: dict[str, Any]  # name, rows, fingerprint
    points: tuple[Point, ...]
    guarantees: tuple[Guarantee, ...] = ()
    scale: float = 1.0  # the best value of the metric: what may be lost is counted in shares of it

    def better(self, a: float, b: float) -> bool:
        """Whether score `a` beats score `b`."""
        return a > b if self.higher_is_better else a < b

    @property
    def loosest(self) -> Point:
        """The full model's own point."""
        return self.points[-1]

    def proven(self, risk: float) -> Guarantee:
        """The cheapest setting that was shown to keep within a risk."""
        fitting = [g for g in self.guarantees if g.risk <= risk]
        if not fitting:
            known = ", ".join(f"{g.risk:g}" for g in self.guarantees) or "none"
            raise OfframpError(
                f"settings with a guaranteed risk of {risk:g}",
                f"a model calibrated for these risks: {known}",
                f"run `offramp calibrate RUN --data FILE --risk {risk:g} --confidence 0.95` first",
            )
        return min(fitting, key=lambda g: g.mac_share)

    def choose(self, budget: float | None, max_loss: float = TOLERANCE) -> Point:
        """The point for a budget; without one the cheapest that loses at most `max_loss`."""
        if not max_loss >= 0.0:
            raise OfframpError("what the metric may lose", f"max_loss={max_loss}", "give 0 or more, e.g. 0.01")
        if budget is None:
            return next((p for p in self.points if self._lost(p) <= max_loss + 1e-9), self.loosest)
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
        lost = (self.loosest.score - point.score) / self.scale
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
        proven = tuple(Guarantee(**one) for one in raw.get("guarantees", ()))
        known = (raw["metric"], raw["higher_is_better"], raw["data"])
        return Points(*known, (first, *others), proven, raw.get("scale", 1.0))
    except (KeyError, TypeError, ValueError) as error:
        raise OfframpError(
            "operating points", f"a damaged points.json in {folder}", "calibrate or train again"
        ) from error
