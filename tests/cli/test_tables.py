"""Tables that commands print: what they show can be typed back."""

from __future__ import annotations

from rich.console import Console

from offramp.cli.printing.tables import points_table
from offramp.inference.operating_points import OperatingPoint, OperatingPoints


def test_shown_settings_can_be_typed_back() -> None:
    settings = {"gamma": 0.9999796, "thresholds": (0.00012345678, 0.5), "hard": False}
    points = OperatingPoints("accuracy", True, {"rows": 9, "name": "dev"}, (OperatingPoint(settings, 0.5, 0.9, 2.0),))
    with (console := Console(width=200)).capture() as shown:
        console.print(points_table(points))
    assert "gamma=0.9999796, thresholds=0.00012345678,0.5, hard=False" in shown.get()
