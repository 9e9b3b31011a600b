"""Progress on standard error: bars on a terminal for what takes a while, single lines elsewhere."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from offramp.cli.printing import progress
from offramp.commands.compare import ComparisonProgress
from offramp.evaluation.comparison import ComparisonPlan, DataSet
from offramp.inference.operating_points import OperatingPoint
from offramp.utils.progress import report_progress
from tests import factories
from tests.cli.calls import Call


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal that keeps what was drawn on it."""
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    monkeypatch.setattr(progress, "err", console)
    monkeypatch.setattr(progress, "BAR_DELAY", 0.0)
    return drawn


@pytest.mark.parametrize(
    ("command", "words", "title"),
    [("eval", ["--data"], "evaluating"), ("predict", ["--output", "out", "--input"], "answering"),
     ("calibrate", ["--data"], "calibrating")],
)  # fmt: skip
def test_long_commands_show_a_bar(
    call: Call, trained: Path, screen: io.StringIO, command: str, words: list[str], title: str
) -> None:
    run = shutil.copytree(trained, "own")
    data = factories.write_jsonl(Path("new.jsonl"), factories.labelled_rows("classification", 40, 8))
    result = call(command, run, *words, data)
    assert result.code == 0 and title in screen.getvalue() and title not in result.out
    assert re.search(r"\b(\d+)/\1\b", screen.getvalue()), "the bar ends full"


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.row_bar("working"):
        report_progress(1, 2)
    assert capsys.readouterr() == ("", "")


def test_no_bar_for_work_that_ends_at_once() -> None:
    drawn = io.StringIO()
    bar = progress.RowBar("working", Console(file=drawn, force_terminal=True))
    bar.update(1, 2)
    bar.close()
    assert drawn.getvalue() == ""


def test_passes_over_the_rows_add_up(screen: io.StringIO) -> None:
    bar = progress.RowBar("working", Console(file=io.StringIO(), force_terminal=True))
    for done in (5, 10, 3, 6):
        bar.update(done, 10 if done > 6 else 6)
    (task,) = bar.progress.tasks
    assert (task.completed, task.total) == (16, 16)
    bar.close()


def test_scoring_of_a_search_is_shown_on_a_terminal(screen: io.StringIO) -> None:
    with progress.SearchDisplay(30) as display:
        for done in range(3):
            display.scoring(done, 2)
            display.live.refresh()
    assert all(f"{done} of 2 configurations" in screen.getvalue() for done in range(3))


def test_draw_front_places_points_by_cost_and_score() -> None:
    best = [OperatingPoint({}, 0.4, 0.6, 3.0), OperatingPoint({}, 1.0, 0.9, 3.0)]
    lines = progress.draw_front(best, [OperatingPoint({}, 0.7, 0.75, 3.0)]).splitlines()
    assert lines[0].rstrip().endswith("●") and lines[0].startswith("  0.9000") and lines[11].startswith("  0.6000 │ ●")
    assert "0.400" in lines[-1] and "1.000" in lines[-1] and sum("·" in line for line in lines) == 1


def test_draw_front_takes_a_single_point() -> None:
    point = OperatingPoint({}, 0.4, 0.6, 3.0)
    assert "●" in progress.draw_front([point], [point])


def test_status_line_counts_cells_and_minutes() -> None:
    data = DataSet("words", "t", "r", "classification")
    cells = ComparisonPlan([data], ["m"], [("full", {}), ("pabee", {}), ("berxit", {})], [1]).cells()
    state = ComparisonProgress(cells, done=["a"], broken={"b": "x"}, current="c", spent=[60.0])
    assert progress.status_line(state) == "1 of 3 cells, 1 broken, about 1 min left: c"
