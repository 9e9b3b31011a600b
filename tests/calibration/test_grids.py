"""Grids of settings: values added between those of a grid, and lengths spread over costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offramp.calibration.grids import EXTRA_RUNS, cliff_lengths, constant_length_grid, length_macs, refine_grid
from offramp.inference.operating_points import OperatingPoint
from offramp.inference.predictor import Predictor
from offramp.nn.lengths import cliffs, shortest_lengths
from tests import factories

GRID = (3.0, 2.0, 1.0, 0.5)


def refine(score: Callable[[float], float]) -> tuple[list[float], list[OperatingPoint]]:
    """Return the scales that are tried beside the grid, and their points, where a scale s costs 1 / (1 + s)."""
    tried = []

    def point(settings: dict[str, Any]) -> OperatingPoint:
        scale = settings["scale"]
        return OperatingPoint({"scale": scale}, 1.0 / (1.0 + scale), score(scale), 6.0)

    def evaluate(settings: dict[str, Any]) -> OperatingPoint:
        tried.append(settings["scale"])
        return point(settings)

    return tried, refine_grid("scale", [point({"scale": scale}) for scale in GRID], point({"scale": 0.0}), evaluate)


def test_refine_grid_splits_the_widest_steps_again_and_again() -> None:
    tried, points = refine(lambda scale: 0.9 if scale < 0.7 else 0.88 - 0.01 * (scale - 0.7))
    assert tried == [0.75, 0.625, 1.5, 0.6875], "by compute times score: the drop at 0.7, then the slope above it too"
    assert [point.settings["scale"] for point in points] == tried


def test_refine_grid_adds_nothing_where_no_score_is_lost() -> None:
    assert refine(lambda scale: 0.9) == ([], [])


def test_refine_grid_adds_nothing_where_the_score_is_useless() -> None:
    tried, _ = refine(lambda scale: 0.9 if scale < 0.2 else 0.5 - 0.1 * scale)
    assert len(tried) == EXTRA_RUNS
    assert max(tried) < 0.5, "below half the score nothing is worth a run"


def row_lengths(run: Path) -> torch.Tensor:
    encoded = Predictor.load(run).prepare(factories.labelled_rows("classification", 20, 7))
    return torch.tensor([len(e.ids) for e in encoded])


def test_constant_length_grid_is_evenly_spread_in_cost(run: Path) -> None:
    network, lengths = Predictor.load(run).network, row_lengths(run)
    grid = constant_length_grid(network, lengths, 5)
    costs = [float(length_macs(network, shares, lengths).sum()) for shares in [*grid, ()]]
    gaps = np.diff(costs)
    assert (gaps > 0).all() and gaps.max() < 3 * gaps.mean()  # tokens are whole: not every cost can be reached


def test_cliff_lengths_are_no_shorter_than_trained_for(run: Path) -> None:
    network = Predictor.load(run).network
    found = cliff_lengths(network, 99)
    assert found == cliffs(shortest_lengths(network)) and found
    assert cliff_lengths(network, 1) == found[:1]
