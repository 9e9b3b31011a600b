"""Progress bars: on a terminal, on standard error, only for what takes a while."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from offramp.cli.printing import progress
from offramp.inference.predictor import Predictor
from offramp.utils.progress import progress_listener, report_progress
from tests import runs
from tests.test_cli import Call, call, rows

__all__ = ["call"]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal that remembers what was drawn on it."""
    drawn = io.StringIO()
    made = Console(file=drawn, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda stderr: made)
    monkeypatch.setattr(progress, "BAR_DELAY", 0.0)
    return drawn


def test_work_tells_how_far_it_is(trained: Path) -> None:
    model, seen = Predictor.load(trained), []
    with progress_listener(lambda done, total: seen.append((done, total))):
        model.predict(runs.rows("classification", 10), batch_size=1)
    model.predict(["nobody watches"])
    assert seen == [(done, 10) for done in range(1, 11)]


@pytest.mark.parametrize(
    ("command", "words", "what"),
    [("eval", ["--data"], "evaluating"), ("predict", ["--output", "out", "--input"], "answering"),
     ("calibrate", ["--data"], "calibrating")],
)  # fmt: skip
def test_long_commands_show_a_bar(
    call: Call, trained: Path, screen: io.StringIO, command: str, words: list[str], what: str, tmp_path: Path
) -> None:
    run = trained
    if command == "calibrate":
        run = tmp_path / "own"
        run.mkdir()
        for name, content in runs.files(trained).items():
            (run / name).write_bytes(content)
    data = rows("new.jsonl", runs.rows("classification", 40, 8))
    said = call(command, run, *words, data)
    assert said.code == 0 and what in screen.getvalue() and "40/40" in screen.getvalue()
    assert what not in said.out


def test_no_bar_where_nobody_looks_or_it_is_over_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.row_bar("working"):
        report_progress(1, 2)
    assert capsys.readouterr() == ("", "")
    drawn = io.StringIO()
    quick = progress.RowBar("working", Console(file=drawn, force_terminal=True))
    quick.update(1, 2)
    quick.close()
    assert drawn.getvalue() == ""


def test_passes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "BAR_DELAY", 0.0)
    made = progress.RowBar("working", Console(file=io.StringIO(), force_terminal=True))
    for done in (5, 10, 3, 6):
        made.update(done, 10 if done > 6 else 6)
    assert made.task is not None
    (task,) = made.progress.tasks
    assert (task.completed, task.total) == (16, 16)
    made.close()
