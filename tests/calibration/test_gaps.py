"""Settings between those of a grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offramp.calibration.grids import EXTRA_RUNS, refine_grid
from offramp.inference.operating_points import OperatingPoint

GRID = (3.0, 2.0, 1.0, 0.5)


def ladder(score: Callable[[float], float]) -> tuple[list[float], list[OperatingPoint]]:
    """The values that are tried beside a grid, and their points, where a scale s costs 1 / (1 + s)."""
    asked = []

    def point(settings: dict[str, Any]) -> OperatingPoint:
        value = settings["scale"]
        return OperatingPoint({"scale": value}, 1.0 / (1.0 + value), score(value), 6.0)

    def counted(settings: dict[str, Any]) -> OperatingPoint:
        asked.append(settings["scale"])
        return point(settings)

    return asked, refine_grid("scale", [point({"scale": value}) for value in GRID], point({"scale": 0.0}), counted)


def test_the_widest_steps_are_split_and_split_again() -> None:
    asked, made = ladder(lambda scale: 0.9 if scale < 0.7 else 0.88 - 0.01 * (scale - 0.7))
    assert asked == [0.75, 0.625, 1.5, 0.6875], "by compute times score: the drop at 0.7, then the slope above it too"
    assert [point.settings["scale"] for point in made] == asked


def test_no_pass_is_spent_where_nothing_is_lost() -> None:
    assert ladder(lambda scale: 0.9) == ([], [])


def test_no_pass_is_spent_where_nobody_would_go() -> None:
    asked, _ = ladder(lambda scale: 0.9 if scale < 0.2 else 0.5 - 0.1 * scale)
    assert len(asked) == EXTRA_RUNS
    assert max(asked) < 0.5, "below half the score nothing is worth a pass"
