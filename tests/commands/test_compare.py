"""`compare`: every cell runs once, a broken one does not stop the others, and earlier results are collected."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offramp.cli import main
from offramp.commands import compare as comparing
from offramp.commands.compare import ComparisonOutput, run_plan
from offramp.errors import OfframpError
from offramp.evaluation.collect import collect_results
from offramp.evaluation.comparison import (
    ComparisonCell,
    ComparisonPlan,
    collected_cells,
    find_data_sets,
    parse_duration,
    parse_methods,
    time_runs,
)
from tests import factories


def small_plan(data: Path, base: str, methods: str) -> ComparisonPlan:
    """Return a plan of these methods, plain fine-tuning and TF-IDF on the data set `words`, for one epoch."""
    wanted = [one for one in parse_methods(methods) if one[0] in ("full", "tfidf", *methods.split(","))]
    training = {"epochs": 1, "batch_size": 8, "lr": 0.01}
    return ComparisonPlan([find_data_sets(str(data), None)[1]], [base], wanted, [42], training)


def test_find_data_sets_lists_folders_with_their_tasks(data: Path) -> None:
    found = [(one.name, one.task) for one in find_data_sets(str(data), 5)]
    assert found == [("numbers", "regression"), ("words", "classification")]
    assert [one.name for one in find_data_sets(str(data / "words"), None)] == ["words"]


@pytest.mark.parametrize(
    ("row", "task"),
    [({"text": "a b", "labels": ["x"]}, "multi_label"), ({"src": "a", "tgt": "b"}, "translation")],
)
def test_find_data_sets_recognises_tasks_as_train_does(tmp_path: Path, row: dict[str, Any], task: str) -> None:
    for split in ("train", "test"):
        factories.write_jsonl(tmp_path / f"{split}.jsonl", [row])
    assert [one.task for one in find_data_sets(str(tmp_path), None)] == [task]


def test_find_data_sets_reads_compare_yaml(data: Path) -> None:
    (data / "compare.yaml").write_text("mine: {train: words/train.jsonl, report: words/test.jsonl, rows: 9}\n")
    (found,) = find_data_sets(str(data), None)
    assert (found.name, found.rows, found.task) == ("mine", 9, "classification")
    assert [find_data_sets(str(data), rows)[0].rows for rows in (5, 20)] == [5, 9]


def test_find_data_sets_refuses_folders_without_splits(data: Path, tmp_path: Path) -> None:
    (data / "compare.yaml").write_text("mine: {train: words/train.jsonl}\n")
    with pytest.raises(OfframpError, match="mine"):
        find_data_sets(str(data), None)
    with pytest.raises(OfframpError, match="no folder with a train"):
        find_data_sets(str(tmp_path), None)


def test_parse_methods_adds_the_static_baselines() -> None:
    methods = parse_methods("pabee")
    assert [name for name, _ in methods] == ["full", "truncate", "truncate", "truncate", "layerdrop", "head_pruning",
                                             "tfidf", "pabee"]  # fmt: skip
    assert ("truncate", {"k": "2"}) in methods
    with pytest.raises(OfframpError, match="pabbee"):
        parse_methods("pabbee")


def test_parse_duration_takes_minutes_and_hours_and_refuses_the_rest() -> None:
    assert parse_duration("2h") == 7200 and parse_duration("90m") == 5400
    for bad in ("", "2", "h", "-1h", "soon"):
        with pytest.raises(OfframpError, match="a time limit"):
            parse_duration(bad)


def test_cells_leave_out_methods_that_do_not_serve_the_task(data: Path) -> None:
    sets = find_data_sets(str(data), None)
    cells = ComparisonPlan(sets, ["m"], parse_methods("branchynet,pabee"), [1, 2]).cells()
    numbers = {cell.method for cell in cells if cell.data.name == "numbers"}
    assert "branchynet" not in numbers and "tfidf" not in numbers and "pabee" in numbers
    assert [cell.method for cell in cells[:2]] == ["full", "full"]  # the others start from them


def test_run_plan_goes_on_after_a_broken_cell_and_runs_none_twice(
    data: Path, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, output = small_plan(data, base, "branchynet,pabee"), ComparisonOutput(tmp_path / "out")
    train_cell = comparing.trained_run

    def break_branchynet(cell: ComparisonCell, *others: Any) -> str:
        if cell.method == "branchynet":
            raise ValueError("no luck")
        return train_cell(cell, *others)

    with monkeypatch.context() as broken:
        broken.setattr(comparing, "trained_run", break_branchynet)
        first = run_plan(plan, output)
    assert len(first.done) == 3 and list(first.broken.values()) == ["ValueError: no luck"] and first.left == 0
    second = run_plan(plan, output)
    assert len(second.done) == 4 and not second.broken and len(second.spent) == 1  # only the broken one ran
    cells = json.loads(next((tmp_path / "out" / "cells").glob("*branchynet*")).read_text())
    assert cells[0]["curve"] and cells[0]["trained"]["init"].endswith("full-s42")


def test_finished_cells_are_timed_once_and_collected_elsewhere(data: Path, base: str, tmp_path: Path) -> None:
    plan, output = small_plan(data, base, "pabee"), ComparisonOutput(tmp_path / "out")
    done, folder = run_plan(plan, output), tmp_path / "out" / "cells"
    timed = [cell for cell in done.cells if cell.method == "pabee"]
    assert time_runs(timed, tmp_path / "out", 4, "offramp compare") == {}
    (file,) = folder.glob("bench-*.json")
    sizes = {row["batch_size"] for row in json.loads(file.read_text())["rows"]}
    assert sizes == {1, 32} and len(collect_results(str(folder)).benches) == 1
    before = file.stat().st_mtime_ns
    assert time_runs(timed, tmp_path / "out", 4, "offramp compare") == {} and file.stat().st_mtime_ns == before
    elsewhere = run_plan(plan, ComparisonOutput(tmp_path / "new", collect=str(folder)))
    assert len(elsewhere.collected) == 2 and len(elsewhere.done) == 1  # TF-IDF is always run
    assert len(collect_results(tmp_path / "new" / "cells").entries) == 3  # collected cells are in the report


def test_threads_without_a_cluster_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="--threads 2 without --cluster"):
        comparing.compare(str(data), str(tmp_path / "out"), threads=2)
    assert not (tmp_path / "out").exists()


def test_models_of_the_same_name_are_both_trained(
    data: Path, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offramp.evaluation.comparison.STATIC", ("full",))
    folders = [shutil.copytree(base, tmp_path / name / "bert") for name in ("a", "b")]
    compared = comparing.compare(
        str(data / "words"),
        str(tmp_path / "out"),
        methods="full",
        models=", ".join(map(str, folders)),
        epochs=1,
        batch_size=8,
        collect=None,
        bench=2,
    )
    assert compared.progress.done == ["words-a-bert-full-s42", "words-b-bert-full-s42"]
    assert not compared.progress.broken
    found = collect_results(tmp_path / "out" / "cells")
    assert [one.model for one in found.entries] == ["a-bert", "b-bert"]
    assert sorted(str(bench["model"]) for _, bench in found.benches) == ["a-bert", "b-bert"]
    plan = ComparisonPlan(
        find_data_sets(str(data / "words"), None),
        [str(folder) for folder in folders],
        [("full", {})],
        [42],
        {"epochs": 1, "batch_size": 8, "lr": 1e-4},
    )
    assert len(collected_cells(str(tmp_path / "out" / "cells"), plan)) == 2


def test_run_plan_refuses_a_folder_of_other_rules(data: Path, base: str, tmp_path: Path) -> None:
    plan, output = small_plan(data, base, "full"), ComparisonOutput(tmp_path / "out")
    run_plan(plan, output)
    longer = replace(plan, training={**plan.training, "epochs": 2})
    assert not collected_cells(str(tmp_path / "out" / "cells"), longer)
    with pytest.raises(OfframpError, match="other rules"):
        run_plan(longer, output)


def test_a_time_limit_stops_before_a_cell(data: Path, base: str, tmp_path: Path) -> None:
    progress = run_plan(small_plan(data, base, "full"), ComparisonOutput(tmp_path / "out", time_limit=0.0))
    assert progress.stopped and progress.left == 2 and not progress.done


def test_the_command_on_pairs_breaks_nothing_and_a_broken_cell_is_an_exit_code(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("offramp.evaluation.comparison.STATIC", ("full", "tfidf"))
    (tmp_path / "pairs").mkdir()
    for split, count, seed in (("train", 24, 0), ("test", 8, 1)):
        factories.write_jsonl(tmp_path / "pairs" / f"{split}.jsonl", factories.labelled_rows("pairs", count, seed))
    words = ["compare", "--data", str(tmp_path / "pairs"), "--models", base, "--methods", "full", "--epochs", "1"]
    words += ["--out", str(tmp_path / "out"), "--collect", str(tmp_path / "none"), "--resume"]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0 and "broken" not in capsys.readouterr().out
    cell = json.loads(next((tmp_path / "out" / "cells").glob("*tfidf*")).read_text())
    assert cell["method"] == "tfidf" and 0 <= cell["metrics"]["accuracy"] <= 1
    for file in (tmp_path / "out" / "cells").glob("*tfidf*"):
        file.unlink()
    monkeypatch.setattr(comparing, "tfidf", lambda *_: 1 / 0)
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 1 and "broken" in capsys.readouterr().out


def test_the_command_writes_a_report_and_continues_with_resume_only(
    data: Path, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("offramp.evaluation.comparison.STATIC", ("full", "tfidf"))
    words = ["compare", "--data", str(data / "words"), "--models", base, "--methods", "full", "--epochs", "1"]
    words += ["--out", str(tmp_path / "out"), "--collect", str(tmp_path / "none")]
    codes = []
    for more in ([], [], ["--resume"]):
        with pytest.raises(SystemExit) as end:
            main([*words, *more])
        codes.append(end.value.code)
    assert codes == [0, 2, 0] and "--resume" in capsys.readouterr().err
    assert (tmp_path / "out" / "report.html").is_file()
