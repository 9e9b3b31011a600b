"""The report is one page with pictures and tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offramp.cli import main
from offramp.commands.report import report
from offramp.errors import OfframpError
from tests.evaluation.result_files import write_results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_results(tmp_path)


def test_report_takes_timings_from_another_folder(folder: Path) -> None:
    found = report(str(folder / "exits"), out=str(folder / "report"), speeds=str(folder / "speed")).found
    assert len(found.benches) == len(found.lengths) == 1 and len(found.entries) == 3


def test_report_writes_one_page_with_pictures_and_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder), "--out", str(folder / "report")])
    assert end.value.code == 0
    printed = capsys.readouterr()
    assert "left out exits/torn.json" in printed.err and "4 models" in printed.out
    text = (folder / "report" / "report.html").read_text(encoding="utf-8")
    held = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert len(held["entries"]) == 4 and "6 damaged files left out" in held["about"]
    assert {row["name"] for row in held["benches"]} == {"branchynet", "hf-sdpa"}
    assert {row["data"] for row in [*held["benches"], *held["lengths"]]} == {"sst2"}
    assert max(row["score"] for row in held["benches"]) == 90.0 and len(held["lengths"]) == 3
    assert 'src="http' not in text and 'href="http' not in text  # nothing is fetched
    assert {path.suffix for path in (folder / "report").iterdir()} == {".html", ".md", ".tex", ".png", ".svg"}


def test_report_of_one_experiment_is_named_by_its_data(folder: Path) -> None:
    names = {path.name for path in report(str(folder / "exits"), out=str(folder / "report")).written}
    assert names == {"report.html", "report.md", "report.tex", "sst2.png", "sst2.svg"}
    assert (folder / "report" / "report.md").read_text(encoding="utf-8").startswith("### sst2")


def test_report_refuses_an_empty_or_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="none in"):
        report(str(tmp_path))
    with pytest.raises(OfframpError, match="missing"):
        report(str(tmp_path / "missing"))
