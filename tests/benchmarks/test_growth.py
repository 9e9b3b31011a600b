"""benchmarks/growth.py on tiny runs: the arithmetic, and that every part runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.growth import GrowthSetup

from benchmarks import growth
from offramp.evaluation.peers import BenchModel, EngineVariant
from tests.factories import labelled_rows, write_jsonl


def setup(run: Path) -> GrowthSetup:
    return GrowthSetup(BenchModel(str(run), "", "", 1), EngineVariant("torch", "fp32"), "0.5", 8, 1)


def test_fit_line_finds_the_slope_and_the_distance() -> None:
    even = growth.fit_line({1000: 3.0, 2000: 5.0, 4000: 9.0})  # a second to start, then 2 ms a row
    assert even["ms_per_row"] == pytest.approx(2.0) and even["departure_from_line"] == pytest.approx(0, abs=1e-9)
    assert even["per_row_last_over_first"] == pytest.approx(0.75)
    square = growth.fit_line({1000: 1.0, 2000: 4.0, 4000: 16.0})
    assert square["departure_from_line"] > 0.1 and square["per_row_last_over_first"] == 4.0


def test_growth_measures_every_size(trained: Path) -> None:
    found = growth.measure_growth(setup(trained), labelled_rows("classification", 20), (40, 80))
    assert found["sizes"] == [40, 80] and len(found["seconds"]) == 2 and found["memory_last_over_first"] > 0
    assert found["seconds_each_round"] == [[s] for s in found["seconds"]] and found["departure_from_line"] < 1e-4
    assert len(found["seconds_first_time"]) == 2


def test_startup_script_writes_every_field(trained: Path, tmp_path: Path) -> None:
    data, kept = write_jsonl(tmp_path / "rows.jsonl", labelled_rows("classification", 2)), tmp_path / "startup.json"
    words = ["startup", str(trained), "--data", data, "--engines", "torch", "--rounds", "1", "--threads", "1"]
    growth.main([*words, "--json", str(kept)])
    written = json.loads(kept.read_text())
    (found,) = written["measured"]
    assert (found["what"], found["engine"], written["threads"]) == ("startup", "torch", 1)
    assert found["best_seconds"] <= found["second_seconds"] and found["help_seconds"] > 0


def test_unknown_engine_is_refused(trained: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", labelled_rows("classification", 2))
    with pytest.raises(SystemExit, match="abacus"):
        growth.main(["rows", str(trained), "--data", data, "--engines", "abacus"])
