"""`evaluate` and `evaluate_points`: result cells of a run, from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offramp.commands.evaluate import evaluate, evaluate_points
from offramp.errors import OfframpError


def test_evaluate_returns_and_writes_the_cell(trained: Path, tmp_path: Path) -> None:
    data = trained.parent / "dev.jsonl"
    cell = evaluate(trained, data, budget=1.0, limit=10, engine="torch", json=tmp_path / "cell.json")
    assert json.loads((tmp_path / "cell.json").read_text()) == json.loads(json.dumps(cell))
    assert (cell["rows"], cell["split"], cell["macs"]["share_of_full"]) == (10, "dev", 1.0)


def test_evaluate_names_the_call_as_the_origin(trained: Path) -> None:
    data = trained.parent / "dev.jsonl"
    assert "budget=0.5" in evaluate(trained, data, budget=0.5)["command"]
    assert evaluate(trained, data, command="make results")["command"] == "make results"


def test_evaluate_takes_settings_instead_of_a_budget(trained: Path) -> None:
    data = trained.parent / "dev.jsonl"
    assert evaluate(trained, data, settings={"threshold": 0.3})["settings"]["threshold"] == 0.3
    with pytest.raises(OfframpError, match="only one of them"):
        evaluate(trained, data, settings={"threshold": 0.3}, budget=0.5)


def test_evaluate_points_begins_with_the_full_model_and_its_curve(trained: Path) -> None:
    cells = evaluate_points(trained, trained.parent / "dev.jsonl", engine="torch")
    assert [cell["chosen"]["by"] for cell in cells] == ["full", "max_loss", "max_loss", "max_loss"]
    assert cells[0]["curve"] and "curve" not in cells[1]
