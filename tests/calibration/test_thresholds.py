"""A threshold per off-ramp: the array arithmetic against a plain loop, and its speed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from offramp.calibration.thresholds import ExitTable, evaluate_thresholds, search_thresholds

LEVELS = np.tile(np.linspace(0.01, 1.0, 41), (6, 1))


def random_table(exit_heads: int, rows: int, seed: int = 0) -> ExitTable:
    rng = np.random.default_rng(seed)
    uncertainty = rng.random((exit_heads, rows)) * np.linspace(1.0, 0.3, exit_heads)[:, None]
    score = (rng.random((exit_heads + 1, rows)) < np.linspace(0.6, 0.95, exit_heads + 1)[:, None]).astype(float)
    reach = np.cumsum(rng.random((exit_heads + 1, rows)) + 1, axis=0)
    return ExitTable(
        uncertainty, score, reach, rng.random((exit_heads, rows)) * 0.05, rng.random((exit_heads, rows)) * 0.01
    )


def one_by_one(table: ExitTable, thresholds: np.ndarray) -> tuple[float, float]:
    cost = score = 0.0
    rows = table.uncertainty.shape[1]
    for row in range(rows):
        for exit_head, limit in enumerate(thresholds):
            cost += table.ask[exit_head, row] if limit > 0 else 0.0
            if table.uncertainty[exit_head, row] < limit:
                cost += table.reach[exit_head, row] + table.answer[exit_head, row]
                score += table.score[exit_head, row]
                break
        else:
            cost += table.reach[-1, row]
            score += table.score[-1, row]
    return cost / rows, score / rows


def test_arrays_equal_a_plain_loop() -> None:
    table = random_table(4, 37)
    settings = np.random.default_rng(1).random((9, 4))
    settings[3] = 0.0
    settings[4, 2] = 0.0
    tried = evaluate_thresholds(table, settings)
    for i, thresholds in enumerate(settings):
        assert (tried.cost[i], tried.score[i]) == pytest.approx(one_by_one(table, thresholds))


def test_front_is_strictly_better_as_it_gets_dearer() -> None:
    front = search_thresholds(random_table(6, 200), np.full((1, 6), 0.2), LEVELS, generations=4)
    assert (np.diff(front.cost) > 0).all() and (np.diff(front.score) > 0).all()


def test_search_finds_at_least_what_it_starts_from() -> None:
    table = random_table(6, 300)
    start = np.repeat(np.linspace(0, 1, 30)[:, None], 6, axis=1)
    first, found = evaluate_thresholds(table, start).front(), search_thresholds(table, start, LEVELS, generations=8)
    for cost, score in zip(first.cost, first.score, strict=True):
        assert found.score[found.cost <= cost + 1e-12].max() >= score


def test_ten_thousand_settings_in_seconds() -> None:
    """872 rows and 12 exits; under 5 seconds is promised, and most machines need one."""
    table = random_table(12, 872)
    started = time.perf_counter()
    evaluate_thresholds(table, np.random.default_rng(0).random((10_000, 12)))
    assert time.perf_counter() - started < 5.0
