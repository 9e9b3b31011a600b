"""Keep only operating points that mean something, and say so where none does.

A point is useless where its expected score is near or below that of a model that always gives the most frequent answer:
a budget that only such a point could meet is better answered with a costlier one. Where no score means anything (hardly
any rows, rows that the model was trained on, a model that has learned nothing), a loss and the default choose the full
setting, and a warning says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from offramp.inference.operating_points import OperatingPoints
from offramp.tasks import Task

FEWEST_ROWS = 20  # rows below which scores mean nothing
NEAR = 0.1  # a point is near the majority answer if it has kept at most this share of what the full model adds to it


def keep_useful_points(points: OperatingPoints, task: Task, rows: Sequence[Mapping[str, Any]]) -> OperatingPoints:
    """Return the points without those near or below the score of the most frequent answer, and with warnings."""
    predictions = task.majority_predictions(rows)
    if predictions is not None:
        majority = task.metrics(rows, predictions)[points.metric]
        points = _above_majority(points, majority)
    if len(rows) < FEWEST_ROWS:
        few = f"{len(rows)} rows are too few to choose settings on, {FEWEST_ROWS} are the least and some hundreds good"
        points = distrust(points, few)
    return points


def distrust(points: OperatingPoints, why: str) -> OperatingPoints:
    """Return points whose scores mean nothing: a loss and the default choose the full setting."""
    return replace(points, trusted=False, warnings=(*points.warnings, f"{why}: the default is the full model"))


def _above_majority(points: OperatingPoints, majority: float) -> OperatingPoints:
    full = points.full_point.score
    known = (
        f"the full model's {points.metric} is {full:.4f}, and always giving the most frequent answer has {majority:.4f}"
    )
    if not points.better(full, majority):
        return distrust(points, known)  # settings stay: none can be distinguished from the full one
    least = majority + NEAR * (full - majority)
    useful = tuple(point for point in points.points[:-1] if points.better(point.score, least))
    dropped = len(points.points) - 1 - len(useful)
    if dropped == 0:
        return points
    words = f"{dropped} setting{'s' * (dropped > 1)} scored near or below the most frequent answer and left out"
    warnings = points.warnings if useful else (*points.warnings, f"no cheaper setting is useful: {words} ({known})")
    return replace(points, points=(*useful, points.full_point), warnings=warnings)
