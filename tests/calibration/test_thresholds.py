"""A threshold per exit: the array arithmetic against a plain loop, the search, and the cuts it starts from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from offramp.calibration.thresholds import CUTS, ExitTable, evaluate_thresholds, search_thresholds, threshold_cuts

LEVELS = np.tile(np.linspace(0.01, 1.0, 41), (6, 1))


def random_table(exits: int, rows: int, seed: int = 0) -> ExitTable:
    rng = np.random.default_rng(seed)
    uncertainty = rng.random((exits, rows)) * np.linspace(1.0, 0.3, exits)[:, None]
    score = (rng.random((exits + 1, rows)) < np.linspace(0.6, 0.95, exits + 1)[:, None]).astype(float)
    reach = np.cumsum(rng.random((exits + 1, rows)) + 1, axis=0)
    return ExitTable(uncertainty, score, reach, rng.random((exits, rows)) * 0.05, rng.random((exits, rows)) * 0.01)


def evaluate_row_by_row(table: ExitTable, thresholds: np.ndarray) -> tuple[float, float]:
    cost = score = 0.0
    rows = table.uncertainty.shape[1]
    for row in range(rows):
        for index, limit in enumerate(thresholds):
            cost += table.ask[index, row] if limit > 0 else 0.0
            if table.uncertainty[index, row] < limit:
                cost += table.reach[index, row] + table.answer[index, row]
                score += table.score[index, row]
                break
        else:
            cost += table.reach[-1, row]
            score += table.score[-1, row]
    return cost / rows, score / rows


def test_evaluate_thresholds_equals_a_plain_loop() -> None:
    table = random_table(4, 37)
    vectors = np.random.default_rng(1).random((9, 4))
    vectors[3] = 0.0
    vectors[4, 2] = 0.0
    evaluated = evaluate_thresholds(table, vectors)
    for i, thresholds in enumerate(vectors):
        assert (evaluated.cost[i], evaluated.score[i]) == pytest.approx(evaluate_row_by_row(table, thresholds))


def test_search_thresholds_returns_a_strictly_rising_front() -> None:
    front = search_thresholds(random_table(6, 200), np.full((1, 6), 0.2), LEVELS, generations=4)
    assert (np.diff(front.cost) > 0).all() and (np.diff(front.score) > 0).all()


def test_search_thresholds_is_never_worse_than_its_start() -> None:
    table = random_table(6, 300)
    start = np.repeat(np.linspace(0, 1, 30)[:, None], 6, axis=1)
    first, found = evaluate_thresholds(table, start).front(), search_thresholds(table, start, LEVELS, generations=8)
    for cost, score in zip(first.cost, first.score, strict=True):
        assert found.score[found.cost <= cost + 1e-12].max() >= score


@settings(max_examples=40)
@given(arrays(np.float64, st.integers(1, 200), elements=st.floats(0, 5).map(lambda x: round(x, 3))))
def test_threshold_cuts_lie_between_values_and_divide_them(values: np.ndarray) -> None:
    cuts = threshold_cuts(values)
    assert cuts == sorted(cuts) and len(cuts) <= CUTS + 1
    assert not set(cuts) & set(values) and values.min() < cuts[0] and values.max() < cuts[-1]
    divisions = {tuple(values < cut) for cut in cuts}
    assert len(divisions) == min(CUTS + 1, len(np.unique(values))) == len(cuts)
