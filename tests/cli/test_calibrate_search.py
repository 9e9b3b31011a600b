"""`offramp calibrate --search`: progress, points, continuing, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offramp.evaluation.curves import measure_curve
from offramp.inference.predictor import Predictor
from offramp.training.schedule import Schedule
from tests import factories
from tests.cli.calls import Call, write_rows


def test_search_finds_points_that_budgets_use(
    call: Call, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = Schedule(epochs=1, batch_size=24, lr=0.005)
    run = factories.run_folder(base, tmp_path, "length_adaptive", schedule=quick)
    data = write_rows("new.jsonl", factories.labelled_rows("classification", 20, 3))
    assert call("eval", run, "--data", data, "--budget", 0.8).code == 0  # training has calibrated a few points
    monkeypatch.setattr("offramp.calibration.length_search.FIRST_POPULATION", 3)
    limits = {"--iterations": 1, "--mutations": 2, "--crossovers": 2, "--search-rows": 8, "--budget": 0.8}
    words = ["--data", data, "--search", *(word for pair in limits.items() for word in pair)]
    result = call("calibrate", run, *words)
    assert result.code == 0 and "budget=0.8" in result.out, result.err
    assert "iteration 1 of 1, 0 to try" in result.err and "tried on 8 rows" in result.err
    assert "configurations on the other rows" in result.err
    points = json.loads((run / "points.json").read_text())
    assert points["data"]["rows"] == 12 and points["data"]["name"].endswith("new.jsonl")
    curve = measure_curve(Predictor.load(run), factories.labelled_rows("classification", 20, 3))
    assert len(curve) == len(points["points"]) and curve[-1].share == pytest.approx(1.0)
    assert curve[0].share < 0.9  # really run: a replay at full length would give 1
    again = call("calibrate", run, *words, "--resume")
    assert again.code == 0 and "iteration" not in again.err  # everything was tried before
    refused = call("calibrate", run, *words)
    assert refused.code == 2 and "--resume" in refused.err
    assert call("eval", run, "--data", data, "--set", "lengths=0.8,0.6").code == 2
    assert call("eval", run, "--data", data, "--set", "lengths=0.8,0.6,0.7").code == 2
    assert "lengths=" in call("info", run).out


def test_search_refuses_a_method_without_lengths_and_a_missing_run(call: Call, trained: Path) -> None:
    data = write_rows("new.jsonl", factories.labelled_rows("classification", 6, 3))
    result = call("calibrate", trained, "--data", data, "--search")
    assert result.code == 2 and "--method length_adaptive" in result.err
    assert "no such folder" in call("calibrate", "nowhere", "--data", data, "--search").err
