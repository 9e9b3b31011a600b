"""benchmarks/fuzz.py: errors are grouped by place, and OfframpError is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from benchmarks import fuzz
from offramp.errors import OfframpError


def test_findings_are_listed_once_with_their_shortest_case() -> None:
    def run(case: Any) -> None:
        if case > 5:
            raise OfframpError("a number", str(case), "smaller")
        if case < 0:
            raise KeyError(case)

    count, findings = fuzz.fuzz(st.integers(-9, 9), run, 1.0, 0)
    (found,) = findings.values()
    assert count > 0 and found["times"] >= 1 and len(found["case"]) <= 2


def test_a_short_run_is_written_and_added_to(tmp_path: Path) -> None:
    target = tmp_path / "fuzz.json"
    for _ in range(2):
        fuzz.main(["--seconds", "0.4", "--targets", "readers,folder", "--json", str(target)])
    study = json.loads(target.read_text())
    assert study["what"] and study["targets"]["readers"]["seconds"] == 0.4
