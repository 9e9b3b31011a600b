"""benchmarks/startup.py: every case runs in a fresh process and is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import startup


def test_main_writes_a_time_for_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: startup.CASES[name] for name in ("python -c pass", "offramp --version")}
    monkeypatch.setattr(startup, "CASES", few)
    startup.main(["--rounds", "2", "--json", str(tmp_path / "startup.json")])
    file = json.loads((tmp_path / "startup.json").read_text())
    assert file["seconds"].keys() == few.keys() and file["rounds"] == 2
    assert all(0 < taken["best"] <= taken["median"] for taken in file["seconds"].values())
