"""A front promises what its settings do on new rows, however many were tried."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from offramp.budget.crossed import crossed
from offramp.budget.subject import Judged
from offramp.model.points import Point, pareto


def right(rows: Sequence[int], answers: Sequence[bool]) -> float:
    return float(np.mean(answers))


def tried(seed: int, rows: int = 300, settings: int = 120) -> tuple[list[Judged], list[float]]:
    """Settings whose truth grows slowly with their cost, and their answers to some rows."""
    rng, costs = np.random.default_rng(seed), np.linspace(0.1, 0.9, settings)
    truths = 0.8 + 0.05 * costs
    shared, own = rng.random(rows), rng.random((settings, rows))
    luck = np.where(rng.random((settings, rows)) < 0.3, own, shared)  # rows are mostly hard for all alike
    answers = luck < truths[:, None]
    points = [Point({"i": i}, float(cost), float(answers[i].mean()), 0.0) for i, cost in enumerate(costs)]
    return [Judged(p, a.tolist()) for p, a in zip(points, answers, strict=True)], truths.tolist()


def test_promises_hold_on_average_where_the_plain_front_flatters_itself() -> None:
    plain, honest = [], []
    for seed in range(60):
        judged, truths = tried(seed)
        loosest = Point({"i": -1}, 1.0, 0.0, 0.0)
        front = pareto([one.point for one in judged], loosest, True)[:-1]
        shared = np.mean([one.point.score for one in judged]) - np.mean(truths)  # these rows were easy for all
        plain.append(np.mean([p.score - truths[p.settings["i"]] for p in front]) - shared)
        found = crossed(judged, loosest, right, True)
        assert [p.settings for p in found] == [p.settings for p in front]
        honest.append(np.mean([p.score - truths[p.settings["i"]] for p in found]) - shared)
    assert np.mean(plain) > 0.015, "the plain front promises too much"
    assert abs(np.mean(honest)) < 0.006


def test_losses_are_told_the_other_way_round() -> None:
    judged, _ = tried(0)
    turned = [Judged(Point(o.point.settings, o.point.mac_share, 1 - o.point.score, 0.0), o.answers) for o in judged]
    one = crossed(judged, Point({}, 1.0, 0.0, 0.0), right, True)
    other = crossed(turned, Point({}, 1.0, 1.0, 0.0), lambda rows, answers: 1 - right(rows, answers), False)
    assert [p.score for p in other] == pytest.approx([1 - p.score for p in one])


def test_one_setting_few_rows_or_none() -> None:
    loosest, only = Point({}, 1.0, 1.0, 0.0), Judged(Point({}, 0.5, 0.5, 0.0), [True, False])
    assert crossed([], loosest, right, True) == []
    assert crossed([only], loosest, right, True) == [only.point]
    assert crossed([Judged(Point({}, 1.5, 0.5, 0.0), [True])], loosest, right, True) == [], "dearer than the full model"
