"""A comparison runs every cell once, goes on after trouble, and collects what is already there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from offramp.cli import main
from offramp.cli.printing.progress import status_line
from offramp.commands import compare as study
from offramp.commands.compare import ComparisonProgress, Place, run_plan
from offramp.errors import OfframpError
from offramp.evaluation.collect import collect_results
from offramp.evaluation.comparison import (
    ComparisonPlan,
    DataSet,
    collected_cells,
    find_data_sets,
    parse_duration,
    parse_methods,
    time_runs,
)
from tests import runs


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, kind in (("words", "classification"), ("numbers", "regression")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for split, count, seed in (("train", 24, 0), ("test", 8, 1)):
            runs.jsonl(tmp_path / "data" / name / f"{split}.jsonl", runs.rows(kind, count, seed))
    return tmp_path / "data"


def plan_of(data: Path, base: str, methods: str) -> ComparisonPlan:
    wanted = [one for one in parse_methods(methods) if one[0] in ("full", "tfidf", *methods.split(","))]
    training = {"epochs": 1, "batch_size": 8, "lr": 0.01}
    return ComparisonPlan([find_data_sets(str(data), None)[1]], [base], wanted, [42], training)


def test_data_sets_are_found_with_their_tasks(data: Path, tmp_path: Path) -> None:
    assert [(one.name, one.task) for one in find_data_sets(str(data), 5)] == [
        ("numbers", "regression"), ("words", "classification"),
    ]  # fmt: skip
    assert [one.name for one in find_data_sets(str(data / "words"), None)] == ["words"]
    (data / "compare.yaml").write_text("mine: {train: words/train.jsonl, report: words/test.jsonl, rows: 9}\n")
    (told,) = find_data_sets(str(data), None)
    assert (told.name, told.rows, told.task) == ("mine", 9, "classification")
    assert [find_data_sets(str(data), rows)[0].rows for rows in (5, 20)] == [5, 9]
    (data / "compare.yaml").write_text("mine: {train: words/train.jsonl}\n")
    with pytest.raises(OfframpError, match="mine"):
        find_data_sets(str(data), None)
    with pytest.raises(OfframpError, match="no folder with a train"):
        find_data_sets(str(tmp_path), None)


def test_static_baselines_are_always_there() -> None:
    asked = parse_methods("pabee")
    assert [name for name, _ in asked] == ["full", "truncate", "truncate", "truncate", "layerdrop", "head_pruning",
                                           "tfidf", "pabee"]  # fmt: skip
    assert ("truncate", {"k": "2"}) in asked
    with pytest.raises(OfframpError, match="pabbee"):
        parse_methods("pabbee")


def test_methods_that_do_not_serve_the_task_are_no_cells(data: Path) -> None:
    sets = find_data_sets(str(data), None)
    cells = ComparisonPlan(sets, ["m"], parse_methods("branchynet,pabee"), [1, 2]).cells()
    numbers = {cell.method for cell in cells if cell.data.name == "numbers"}
    assert "branchynet" not in numbers and "tfidf" not in numbers and "pabee" in numbers
    assert [cell.method for cell in cells[:2]] == ["full", "full"]  # the others start from them


def test_every_cell_runs_once_and_a_broken_one_stops_nobody(
    data: Path, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, where = plan_of(data, base, "branchynet,pabee"), Place(tmp_path / "out")
    real, started = study.trained, []

    def sabotaged(cell, plan, out):  # type: ignore[no-untyped-def]
        started.append(cell.method)
        if cell.method == "branchynet":
            raise ValueError("no luck")
        return real(cell, plan, out)

    monkeypatch.setattr(study, "trained", sabotaged)
    made = run_plan(plan, where)
    assert len(made.done) == 3 and list(made.broken.values()) == ["ValueError: no luck"] and made.left == 0
    monkeypatch.setattr(study, "trained", real)
    started.clear()
    again = run_plan(plan, where)
    assert len(again.done) == 4 and not again.broken and len(again.spent) == 1  # only the broken one ran
    cells = json.loads(next((tmp_path / "out" / "cells").glob("*branchynet*")).read_text())
    assert cells[0]["curve"] and cells[0]["trained"]["init"].endswith("full-s42")
    timed = [cell for cell in again.cells if cell.method == "branchynet"]
    assert time_runs(timed, tmp_path / "out", 4, "offramp compare") == {}
    (file,) = (tmp_path / "out" / "cells").glob("bench-*.json")
    sizes = {row["batch_size"] for row in json.loads(file.read_text())["rows"]}
    assert sizes == {1, 32} and len(collect_results(str(file.parent)).benches) == 1
    before = file.stat().st_mtime_ns
    assert time_runs(timed, tmp_path / "out", 4, "offramp compare") == {} and file.stat().st_mtime_ns == before
    elsewhere = run_plan(plan, Place(tmp_path / "new", collect=str(tmp_path / "out" / "cells")))
    assert len(elsewhere.collected) == 3 and len(elsewhere.done) == 1  # words are counted anew
    assert len(collect_results(tmp_path / "new" / "cells").entries) == 4  # what was collected stands in the report
    longer = replace(plan, training={**plan.training, "epochs": 2})
    assert not collected_cells(str(tmp_path / "out" / "cells"), longer)
    with pytest.raises(OfframpError, match="other rules"):
        run_plan(longer, where)


def test_a_time_limit_stops_before_a_cell(data: Path, base: str, tmp_path: Path) -> None:
    made = run_plan(plan_of(data, base, "full"), Place(tmp_path / "out", time_limit=0.0))
    assert made.stopped and made.left == 2 and not made.done
    assert parse_duration("2h") == 7200 and parse_duration("90m") == 5400
    for bad in ("", "2", "h", "-1h", "soon"):
        with pytest.raises(OfframpError, match="a time limit"):
            parse_duration(bad)


def test_the_command_writes_a_report_and_asks_before_going_on(
    data: Path, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("offramp.evaluation.comparison.STATIC", ("full", "tfidf"))
    words = ["compare", "--data", str(data / "words"), "--models", base, "--methods", "full", "--epochs", "1"]
    words += ["--out", str(tmp_path / "out"), "--collect", str(tmp_path / "none")]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0 and (tmp_path / "out" / "report.html").is_file()
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and "--resume" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main([*words, "--resume"])
    assert end.value.code == 0


def test_the_status_line() -> None:
    one = DataSet("words", "t", "r", "classification")
    cells = ComparisonPlan([one], ["m"], [("full", {}), ("pabee", {}), ("berxit", {})], [1]).cells()
    made = ComparisonProgress(cells, done=["a"], broken={"b": "x"}, current="c", spent=[60.0])
    assert status_line(made) == "1 of 3 cells, 1 broken, about 1 min left: c"
