"""The report is one page with pictures and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from offramp.cli import main
from offramp.commands.report import report
from offramp.errors import OfframpError
from tests.evaluation.result_files import perplexity_cells, write_results


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


def test_the_picture_shows_the_best_perplexities_which_are_the_lowest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[list[float], list[float]]] = []

    def plot(axes: Axes, x: list[float], y: list[float], *others: Any, **more: Any) -> Any:
        drawn.append((x, y))
        return real(axes, x, y, *others, **more)

    real = Axes.plot
    monkeypatch.setattr(Axes, "plot", plot)
    cells = perplexity_cells(5.0, [(0.2, 9.0), (0.6, 5.04), (1.0, 5.0)])
    (tmp_path / "a.json").write_text(json.dumps(cells))
    report(str(tmp_path), out=str(tmp_path / "report"))
    assert drawn == [([0.6, 1.0], [5.04, 5.0])]
    text = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    held = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert [one["higher_is_better"] for one in held["entries"]] == [False]


def test_report_of_a_masked_language_model_that_eval_wrote(every_task: dict[str, Path], tmp_path: Path) -> None:
    run, data = every_task["masked_lm"], every_task["masked_lm"].parent / "dev.jsonl"
    (tmp_path / "results").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["eval", str(run), "--data", str(data), "--curve", "--json", str(tmp_path / "results" / "a.json")])
    assert end.value.code in (0, None)
    (one,) = report(str(tmp_path / "results"), out=str(tmp_path / "report")).found.entries
    assert one.metric == "perplexity" and not one.higher_is_better
    assert one.cells[0]["higher_is_better"] is False


def test_report_refuses_a_folder_for_tables_alone(folder: Path) -> None:
    with pytest.raises(OfframpError, match=r"--out other and --markdown tables\.md"):
        report(str(folder), out="other", markdown="tables.md")


def test_report_refuses_an_empty_or_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="none in"):
        report(str(tmp_path))
    with pytest.raises(OfframpError, match="missing"):
        report(str(tmp_path / "missing"))
