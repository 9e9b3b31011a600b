"""Tables that commands print: what they show can be typed back."""

from __future__ import annotations

import pytest
from rich.console import Console

from offramp.cli.printing.bench_tables import DROPPED_FIRST, bench_cells, bench_table
from offramp.cli.printing.console import fit_table, print_table
from offramp.cli.printing.tables import points_table
from offramp.inference.operating_points import OperatingPoint, OperatingPoints


def test_shown_settings_can_be_typed_back() -> None:
    settings = {"gamma": 0.9999796, "thresholds": (0.00012345678, 0.5), "hard": False}
    points = OperatingPoints("accuracy", True, {"rows": 9, "name": "dev"}, (OperatingPoint(settings, 0.5, 0.9, 2.0),))
    with (console := Console(width=200)).capture() as shown:
        console.print(points_table(points))
    assert "gamma=0.9999796, thresholds=0.00012345678,0.5, hard=False" in shown.get()


BENCH_ENTRY = {
    "engine": "openvino",
    "peer": False,
    "precision": "fp32",
    "budget": "max-loss=0.01",
    "rows_per_second": 12345.6,
    "rows_per_second_best": 13345.6,
    "p50_ms": 123.45,
    "p95_ms": 223.45,
    "peak_mb": 1234.0,
    "metrics": {"entity_f1": 0.91},
    "mac_share": 0.5,
    "speed_up": 1.9,
    "realised_over_promised": 0.9,
    "over_fastest_peer": 1.2,
}


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_a_table_fits_by_leaving_columns_out_and_cuts_no_cell(width: int) -> None:
    table = bench_table([BENCH_ENTRY], "entity_f1", "batch 1")
    fitting, dropped = fit_table(table, width, DROPPED_FIRST)
    with (console := Console(width=width)).capture() as shown:
        console.print(fitting)
    assert "…" not in shown.get() and max(map(len, shown.get().splitlines())) <= width
    assert "offramp openvino" in shown.get() and (width < 60 or "12345.6" in shown.get())
    assert bool(dropped) == (width < 160) and len(fitting.columns) + len(dropped) == len(table.columns)


def test_a_table_is_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table(bench_table([BENCH_ENTRY], "entity_f1", "batch 1"))
    printed = capsys.readouterr().out
    assert all(cell in printed for cell in bench_cells(BENCH_ENTRY, "entity_f1")) and "…" not in printed


def test_an_expected_f1_is_not_negative() -> None:
    below = OperatingPoint({}, 0.1, -0.02, 1.0), OperatingPoint({}, 1.0, 0.9, 2.0)
    for metric, expected in (("f1", "0.0000"), ("pearson", "-0.0200")):
        points = OperatingPoints(metric, True, {"rows": 9, "name": "dev"}, below)
        with (console := Console(width=200)).capture() as shown:
            console.print(points_table(points))
        assert expected in shown.get() and ("-0.02" in shown.get()) == (metric == "pearson")
