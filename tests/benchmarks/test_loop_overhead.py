"""benchmarks/loop_overhead.py runs, and reports every number; how large they are is a matter of the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import loop_overhead
from tests.factories import labelled_rows, write_jsonl


def test_overhead_without_a_run(tmp_path: Path) -> None:
    loop_overhead.main(["--repetitions", "3", "--json", str(tmp_path / "o.json")])
    times = json.loads((tmp_path / "o.json").read_text())["microseconds_a_layer"]
    assert len(times) == 2 and all(value > 0 for value in times.values())


def test_overhead_in_the_shape_of_a_run(trained: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", labelled_rows("classification", 4))
    loop_overhead.main([str(trained), "--data", data, "--rounds", "1", "--json", str(tmp_path / "o.json")])
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["layers"] == 3 and found["method"] == "branchynet"
    assert {"us_per_layer", "us_per_layer_in_halves", "us_per_call", "us_counting"} <= found.keys()


def test_run_without_data_is_refused(trained: Path) -> None:
    with pytest.raises(SystemExit):
        loop_overhead.main([str(trained)])
