"""Growth, start-up and overhead, on tiny runs: the arithmetic, and that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from offramp.evaluation.growth import Setup, growth, linear, overhead, startup
from offramp.evaluation.peers import Ground, Variant
from offramp.inference.predictor import Predictor
from tests import runs


def setup(run: Path) -> Setup:
    return Setup(Ground(str(run), "", "", 1), Variant("torch", "fp32"), "0.5", 8, 1)


def test_a_straight_line() -> None:
    even = linear({1000: 3.0, 2000: 5.0, 4000: 9.0})  # a second to begin with, then 2 ms a row
    assert even["ms_per_row"] == pytest.approx(2.0) and even["departure_from_line"] == pytest.approx(0, abs=1e-9)
    assert even["per_row_last_over_first"] == pytest.approx(0.75)
    square = linear({1000: 1.0, 2000: 4.0, 4000: 16.0})
    assert square["departure_from_line"] > 0.1 and square["per_row_last_over_first"] == 4.0


def test_growth(trained: Path) -> None:
    found = growth(setup(trained), runs.rows("classification", 20), (40, 80))
    assert found["sizes"] == [40, 80] and all(s > 0 for s in found["seconds"]) and found["memory_last_over_first"] > 0
    assert found["seconds_each_round"] == [[s] for s in found["seconds"]] and found["departure_from_line"] < 1e-4
    assert len(found["seconds_first_time"]) == 2 and min(found["seconds_first_time"]) > 0


def test_startup(trained: Path) -> None:
    found = startup(setup(trained), runs.rows("classification", 2))
    assert 0 < found["best_seconds"] <= found["second_seconds"] and found["help_seconds"] > 0


def test_overhead(trained: Path) -> None:
    found = overhead(Predictor.load(trained, "torch"), runs.rows("classification", 8), 1)
    assert found["layers"] == 3 and found["us_per_layer_in_halves"] > 0 and 0 < found["us_per_layer"] < 1e5
