"""Curves: every cell equals a real evaluation of its setting; the picture is written completely or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from offramp.errors import OfframpError
from offramp.evaluation.collect import CurvePoint
from offramp.evaluation.curves import CurvePicture, draw_curve, sweep_points
from offramp.evaluation.result_cells import Origin, evaluate_setting
from offramp.inference.operating_points import RiskGuarantee
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from tests.factories import labelled_rows

NOT_COMPARED = ("seconds", "chosen", "curve")


def swept(run: Path, kind: str) -> tuple[Predictor, list[dict[str, Any]], Origin, list[dict[str, Any]]]:
    predictor, rows = Predictor.load(run), labelled_rows(kind, 20, 3)
    origin = Origin("tiny", "test", "offramp eval", read_recipe(run))
    return predictor, rows, origin, sweep_points(predictor, rows, origin, batch_size=6)


@pytest.mark.parametrize("kind", ["classification", "tagging", "regression", "masked_lm"])
def test_sweep_points_equals_real_runs(every_task: dict[str, Path], kind: str) -> None:
    predictor, rows, origin, cells = swept(every_task[kind], kind)
    assert [(c["chosen"]["by"], c["chosen"]["value"]) for c in cells] == [
        ("full", None), ("max_loss", 0.005), ("max_loss", 0.01), ("max_loss", 0.02)]  # fmt: skip
    for cell in cells:
        chosen = cell["chosen"]
        budget = {"max_loss": chosen["value"]} if chosen["by"] == "max_loss" else {"budget": 1.0}
        real = evaluate_setting(predictor, rows, predictor.settings(**budget), origin, batch_size=6)
        assert {k: v for k, v in cell.items() if k not in NOT_COMPARED} == {
            k: v for k, v in real.items() if k not in NOT_COMPARED
        }
        assert cell["seconds"] is None


def test_sweep_points_curve_has_every_operating_point(trained: Path) -> None:
    predictor, rows, origin, (first, *others) = swept(trained, "classification")
    assert predictor.points is not None and not any("curve" in cell for cell in others)
    assert len(first["curve"]) == len(predictor.points.points) > 1
    for entry, point in zip(first["curve"], predictor.points.points, strict=True):
        real = evaluate_setting(predictor, rows, predictor.settings(given=point.settings), origin, batch_size=6)
        assert (entry["metrics"], entry["share_of_full"]) == (real["metrics"], real["macs"]["share_of_full"])
        assert entry["expected"]["mac_share"] == point.mac_share and entry["settings"] == point.settings


def test_sweep_points_has_a_cell_for_each_proven_risk(trained: Path) -> None:
    predictor, rows = Predictor.load(trained), labelled_rows("classification", 20, 3)
    assert predictor.points is not None
    proven = RiskGuarantee(0.1, 0.9, {"threshold": 0.2}, 100, 0.05, 0.6)
    predictor.points = replace(predictor.points, guarantees=(proven,))
    *_, last = sweep_points(predictor, rows, Origin("tiny", "test", "", {}))
    assert last["chosen"]["by"] == "risk" and last["chosen"]["expected"]["confidence"] == 0.9
    assert last["settings"]["threshold"] == 0.2


def test_sweep_points_refuses_a_model_without_points(trained: Path) -> None:
    predictor = Predictor.load(trained)
    predictor.points = None
    with pytest.raises(OfframpError, match="calibrate"):
        sweep_points(predictor, labelled_rows("classification", 3), Origin("tiny", "test", "", {}))


POINTS = [CurvePoint(0.5, 0.8), CurvePoint(0.0, 0.5), CurvePoint(1.0, 0.82)]


def test_draw_curve_has_line_and_marks(tmp_path: Path) -> None:
    draw_curve(CurvePicture("a title", "accuracy", POINTS, full=POINTS[2], chosen=POINTS[0]), tmp_path / "curve.png")
    pixels = imread(tmp_path / "curve.png")
    assert pixels.shape == (660, 1080, 4)
    for colour in ((0x2F, 0x6D, 0xB3), (0xD1, 0x49, 0x5B), (0x44, 0x44, 0x44)):  # line, chosen, full
        near = np.abs(pixels[..., :3] * 255 - np.array(colour)).max(axis=-1) < 8
        assert near.sum() > 60


def test_draw_curve_with_one_point(tmp_path: Path) -> None:
    draw_curve(
        CurvePicture("full only", "accuracy", POINTS[2:], full=POINTS[2], chosen=POINTS[2]), tmp_path / "curve.png"
    )
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_draw_curve_refuses_a_path_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of the folder")
    with pytest.raises(OfframpError, match="to write"):
        draw_curve(CurvePicture("t", "accuracy", POINTS, POINTS[2], POINTS[0]), tmp_path / "file" / "curve.png")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
