"""Speed against length: rows fall into groups by their own length, and numbers are a row's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offramp.cli import app
from offramp.errors import OfframpError
from offramp.evaluation.lengths import Effort, by_length
from offramp.evaluation.result_cells import Origin
from offramp.inference.predictor import Predictor
from tests import runs

LONG = {"text": "the film is very good and " * 6, "label": "good"}
SOME = [*runs.rows("classification", 40, 3), LONG]


def test_groups_by_length(trained: Path) -> None:
    predictor = Predictor.load(trained, engine="torch")
    origin = Origin("tiny", "test", "offramp lengths", {})
    found = by_length(predictor, SOME, predictor.settings(0.5), origin, Effort(batch_size=8, rows=20, rounds=1))
    groups = found["lengths"]
    edges = [length for group in groups for length in group["tokens"]]
    assert edges == sorted(edges) and len(groups) > 2 and groups[-1]["rows"] == 1
    assert edges[-1] == len(predictor.prepare([LONG])[0].ids) == groups[-1]["mean_tokens"]
    assert all(group["rows"] <= 20 and group["ms"] > 0 and group["ms_full"] > 0 for group in groups)
    assert all(0 < group["mac_share"] <= 1.1 and 0 <= group["mean_exit_layer"] <= 3 for group in groups)
    with pytest.raises(OfframpError, match="at least one row"):
        by_length(predictor, [], predictor.settings(0.5), origin, Effort())


def test_the_command(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, kept = runs.jsonl(tmp_path / "rows.jsonl", SOME), tmp_path / "lengths.json"
    words = ["lengths", str(trained), "--data", data, "--set", "threshold=0.3", "--engine", "torch"]
    words += ["--rounds", "1", "--json", str(kept)]
    app(words, standalone_mode=False)
    assert "speed-up" in capsys.readouterr().out
    found = json.loads(kept.read_text())
    assert found["settings"]["threshold"] == 0.3 and found["hardware"] and found["lengths"]
