"""A curve: every cell is what a real evaluation of that setting finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offramp.errors import OfframpError
from offramp.evaluation.point_sweep import sweep_points
from offramp.evaluation.result_cells import Origin, evaluate_setting
from offramp.inference.operating_points import RiskGuarantee
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from tests import runs

CLOCK = ("seconds", "chosen", "curve")


def swept(run: Path, kind: str) -> tuple[Predictor, runs.Rows, Origin, list[dict[str, Any]]]:
    predictor, rows = Predictor.load(run), runs.rows(kind, 20, 3)
    origin = Origin("tiny", "test", "offramp eval", read_recipe(run))
    return predictor, rows, origin, sweep_points(predictor, rows, origin, batch_size=6)


@pytest.mark.parametrize("kind", ["classification", "tagging", "regression", "masked_lm"])
def test_cells_are_those_of_real_runs(every_task: dict[str, Path], kind: str) -> None:
    predictor, rows, origin, cells = swept(every_task[kind], kind)
    wishes = {"full": {"budget": 1.0}, "max_loss": {}}
    assert [(c["chosen"]["by"], c["chosen"]["value"]) for c in cells] == [
        ("full", None), ("max_loss", 0.005), ("max_loss", 0.01), ("max_loss", 0.02)]  # fmt: skip
    for cell in cells:
        chosen = cell["chosen"]
        asked = {"max_loss": chosen["value"]} if chosen["by"] == "max_loss" else wishes[chosen["by"]]
        real = evaluate_setting(predictor, rows, predictor.settings(**asked), origin, batch_size=6)
        assert {k: v for k, v in cell.items() if k not in CLOCK} == {k: v for k, v in real.items() if k not in CLOCK}
        assert cell["seconds"] is None


def test_the_curve_has_every_point_and_what_was_promised_of_it(trained: Path) -> None:
    predictor, rows, origin, (first, *others) = swept(trained, "classification")
    assert predictor.points is not None and not any("curve" in cell for cell in others)
    assert len(first["curve"]) == len(predictor.points.points) > 1
    for spot, point in zip(first["curve"], predictor.points.points, strict=True):
        real = evaluate_setting(predictor, rows, predictor.settings(given=point.settings), origin, batch_size=6)
        assert (spot["metrics"], spot["share_of_full"]) == (real["metrics"], real["macs"]["share_of_full"])
        assert spot["expected"]["mac_share"] == point.mac_share and spot["settings"] == point.settings


def test_proven_risks_have_cells_too(trained: Path) -> None:
    predictor, rows = Predictor.load(trained), runs.rows("classification", 20, 3)
    assert predictor.points is not None
    proven = RiskGuarantee(0.1, 0.9, {"threshold": 0.2}, 100, 0.05, 0.6)
    object.__setattr__(predictor.points, "guarantees", (proven,))
    *_, last = sweep_points(predictor, rows, Origin("tiny", "test", "", {}))
    assert last["chosen"]["by"] == "risk" and last["chosen"]["expected"]["confidence"] == 0.9
    assert last["settings"]["threshold"] == 0.2


def test_a_model_without_points_has_no_curve(trained: Path) -> None:
    predictor = Predictor.load(trained)
    predictor.points = None
    with pytest.raises(OfframpError, match="calibrate"):
        sweep_points(predictor, runs.rows("classification", 3), Origin("tiny", "test", "", {}))
