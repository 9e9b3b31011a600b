"""benchmarks/shared_predictor.py: one thread and many give the same answers; rates are written."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import shared_predictor
from tests.factories import labelled_rows, write_jsonl


def test_a_short_measurement_is_written(trained: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", labelled_rows("classification", 12, 3))
    target = tmp_path / "found.json"
    words = ["--run", str(trained), "--data", data, "--engines", "torch", "--rounds", "1", "--json", str(target)]
    shared_predictor.main(words)
    by_threads = json.loads(target.read_text())["engines"]["torch"]
    assert set(by_threads) == {"1 thread", "all cores"}
    full, half = by_threads["1 thread"]
    assert full["answers_equal"] and half["answers_equal"] and full["calls_per_second"]["many"] > 0
