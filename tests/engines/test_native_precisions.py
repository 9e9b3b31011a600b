"""The comparison of precisions: fp32 agrees with itself, and every budget and precision has an entry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.precision_agreement import compare_precisions, main

from tests.factories import labelled_rows


def test_precisions_are_compared_with_fp32(trained: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in labelled_rows("classification", 12, 3)))
    found = compare_precisions(str(trained), str(data), 10, ["1.0", "0.5"], 1, ("fp32", "int8"))
    assert [(e["budget"], e["precision"]) for e in found] == [(b, p) for b in ("1.0", "0.5") for p in ("fp32", "int8")]
    assert all(e["other_answers"] == e["other_exits"] == 0.0 for e in found if e["precision"] == "fp32")
    assert found[0]["mac_share"] == pytest.approx(1.0)
    main([str(trained), "--data", str(data), "--budgets", "1.0", "--threads", "1", "--out", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["row_count"] == 12
