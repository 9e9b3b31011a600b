"""benchmarks/promises.py: calibrations on drawn rows are measured on the others, and a study goes on from its file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import promises
from tests.factories import labelled_rows, write_jsonl


def test_a_tiny_study_is_written_and_continued(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "many.jsonl", labelled_rows("classification", 90, 6))
    target = tmp_path / "found.json"
    words = ["promises.py", str(trained), "--data", data, "--rows", "50", "--json", str(target), "--trials"]
    for trials in ("1", "2"):
        monkeypatch.setattr(sys, "argv", [*words, trials])
        promises.main()
    (run,) = json.loads(target.read_text())["runs"].values()
    assert [line["trials"] for line in run["summary"]] == [2] * 6
    assert {one["trial"] for one in run["trials"]} == {0, 1} and len(run["trials"]) == 12
    assert all(0.0 <= line["broken"] <= 1.0 and 0.0 < line["mac_share"] <= 1.01 for line in run["summary"])
    assert "broken in" in capsys.readouterr().out
