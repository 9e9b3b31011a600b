"""The picture: a real image of the promised size, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from offramp.errors import OfframpError
from offramp.evaluation.curve import CurvePicture, CurvePoint, draw_curve

POINTS = [CurvePoint(0.5, 0.8), CurvePoint(0.0, 0.5), CurvePoint(1.0, 0.82)]


def test_a_readable_picture(tmp_path: Path) -> None:
    draw_curve(CurvePicture("a title", "accuracy", POINTS, full=POINTS[2], chosen=POINTS[0]), tmp_path / "curve.png")
    pixels = imread(tmp_path / "curve.png")
    assert pixels.shape == (660, 1080, 4)
    for colour in ((0x2F, 0x6D, 0xB3), (0xD1, 0x49, 0x5B), (0x44, 0x44, 0x44)):  # line, chosen, full
        near = np.abs(pixels[..., :3] * 255 - np.array(colour)).max(axis=-1) < 8
        assert near.sum() > 60


def test_one_point_is_enough(tmp_path: Path) -> None:
    draw_curve(
        CurvePicture("full only", "accuracy", POINTS[2:], full=POINTS[2], chosen=POINTS[2]), tmp_path / "curve.png"
    )
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_nowhere_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of the folder")
    with pytest.raises(OfframpError, match="to write"):
        draw_curve(CurvePicture("t", "accuracy", POINTS, POINTS[2], POINTS[0]), tmp_path / "file" / "curve.png")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
