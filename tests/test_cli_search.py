"""`offramp search` from the command line: progress, points, refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from offramp.calibration.length_search import SearchPlan
from offramp.cli.printing import progress
from offramp.cli.printing.progress import draw_front
from offramp.evaluation.budgets import measure_curve
from offramp.inference.operating_points import OperatingPoint
from offramp.inference.predictor import Predictor
from offramp.training.schedule import Schedule
from tests import runs
from tests.test_cli import Call, call, rows

__all__ = ["call"]  # the fixture of the other commands' tests


def test_search_finds_points_and_budgets_use_them(
    call: Call, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = Schedule(epochs=1, batch_size=24, lr=0.005)
    run = runs.train(base, tmp_path, "length_adaptive", schedule=quick)
    data = rows("new.jsonl", runs.rows("classification", 20, 3))
    assert call("eval", run, "--data", data, "--budget", 0.8).code == 0  # a quick curve was made by training
    monkeypatch.setattr("offramp.calibration.length_search.FIRST_POPULATION", 3)
    words = ["--data", data, "--iterations", 1, "--mutations", 2, "--crossovers", 2, "--rows", 8, "--budget", 0.8]
    said = call("search", run, *words)
    assert said.code == 0 and "for budget 0.8" in said.out, said.err
    assert "iteration 1 of 1, 0 to try" in said.err and "tried on 8 rows" in said.err
    assert "configurations on the other rows" in said.err
    points = json.loads((run / "points.json").read_text())
    assert points["data"]["rows"] == 12 and points["data"]["name"].endswith("new.jsonl")
    curve = measure_curve(Predictor.load(run), runs.rows("classification", 20, 3))
    assert len(curve) == len(points["points"]) and curve[-1].share == pytest.approx(1.0)
    assert curve[0].share < 0.9  # run for real: a replay of full length would say 1
    again = call("search", run, *words, "--resume")
    assert again.code == 0 and "iteration" not in again.err  # everything was tried before
    refused = call("search", run, *words)
    assert refused.code == 2 and "--resume to continue" in refused.err
    assert call("eval", run, "--data", data, "--set", "lengths=0.8,0.6").code == 2
    assert call("eval", run, "--data", data, "--set", "lengths=0.8,0.6,0.7").code == 2
    assert "lengths=" in call("info", run).out


def test_what_cannot_be_searched_is_refused(call: Call, trained: Path) -> None:
    data = rows("new.jsonl", runs.rows("classification", 6, 3))
    said = call("search", trained, "--data", data)
    assert said.code == 2 and "--method length_adaptive" in said.err
    assert "no such folder" in call("search", "nowhere", "--data", data).err


def test_scoring_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(progress, "err", Console(file=drawn, force_terminal=True, width=100))
    with progress.SearchDisplay(SearchPlan()) as live:
        for done in range(3):
            live.scoring(done, 2)
            live.live.refresh()
    assert all(f"{done} of 2 configurations" in drawn.getvalue() for done in range(3))


def test_the_front_is_drawn_in_letters() -> None:
    best = [OperatingPoint({}, 0.4, 0.6, 3.0), OperatingPoint({}, 1.0, 0.9, 3.0)]
    lines = draw_front(best, [OperatingPoint({}, 0.7, 0.75, 3.0)]).splitlines()
    assert lines[0].rstrip().endswith("●") and lines[0].startswith("  0.9000") and lines[11].startswith("  0.6000 │ ●")
    assert "0.400" in lines[-1] and "1.000" in lines[-1] and sum("·" in line for line in lines) == 1
    assert draw_front(best[:1], best[:1])
