"""benchmarks/speed_by_length.py: rows are grouped by their own length, and numbers are per row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.speed_by_length import LengthTiming, time_by_length

from benchmarks import speed_by_length
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import Origin
from offramp.inference.predictor import Predictor
from tests.factories import labelled_rows, translation_rows, write_jsonl

LONG = {"text": "the film is very good and " * 6, "label": "good"}
ROWS = [*labelled_rows("classification", 40, 3), LONG]
ORIGIN = Origin("tiny", "test", speed_by_length.PROGRAM, {})


def test_rows_are_grouped_by_length(trained: Path) -> None:
    predictor = Predictor.load(trained, engine="torch")
    timing = LengthTiming(batch_size=8, rows=20, rounds=1)
    groups = time_by_length(predictor, ROWS, predictor.settings(0.5), ORIGIN, timing)["lengths"]
    edges = [length for group in groups for length in group["tokens"]]
    assert edges == sorted(edges) and len(groups) > 2 and groups[-1]["rows"] == 1
    assert edges[-1] == len(predictor.prepare([LONG])[0].ids) == groups[-1]["mean_tokens"]
    assert all(group["rows"] <= 20 and group["ms"] > 0 and group["ms_full"] > 0 for group in groups)
    assert all(0 < group["mac_share"] <= 1.1 and 0 <= group["mean_exit_layer"] <= 3 for group in groups)


def test_no_rows_are_refused(trained: Path) -> None:
    predictor = Predictor.load(trained, engine="torch")
    with pytest.raises(OfframpError, match="at least one row"):
        time_by_length(predictor, [], predictor.settings(0.5), ORIGIN, LengthTiming())


def test_script_writes_and_prints_the_groups(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, kept = write_jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "lengths.json"
    words = [str(trained), "--data", data, "--set", "threshold=0.3", "--engine", "torch", "--rounds", "1"]
    speed_by_length.main([*words, "--json", str(kept)])
    assert "speed-up" in capsys.readouterr().out
    found = json.loads(kept.read_text())
    assert found["settings"]["threshold"] == 0.3 and found["hardware"] and found["lengths"]


def test_translation_runs_are_timed_too(translation_run: Path) -> None:
    predictor = Predictor.load(translation_run)
    rows, timing = translation_rows(8, seed=4), LengthTiming(rounds=1)
    groups = time_by_length(predictor, rows, predictor.settings(0.9), ORIGIN, timing)["lengths"]
    assert groups and all(group["mac_share"] < 1 for group in groups)
