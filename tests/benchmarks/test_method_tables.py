"""Method tables: which jobs a study has, how rows are split, and one study end to end."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import method_tables
from offramp import methods
from offramp.data.readers import read_rows
from offramp.errors import OfframpError
from tests import factories


def write_set(folder: Path, **splits: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    for name, rows in splits.items():
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def test_defaults_has_every_adaptive_method_and_no_option() -> None:
    jobs = method_tables.jobs_of("defaults", ["mr"], [])
    assert {job.method for job in jobs} >= {"full", "alberta", "adapler", "pabee", "tr_bert"}
    assert not any(job.options for job in jobs) and {job.method for job in jobs} <= set(methods.names())


def test_exit0_trains_a_second_time_only_where_exits_depend_on_each_other() -> None:
    jobs = method_tables.jobs_of("exit0", ["trec"], ["deebert", "pabee"])
    assert [(job.method, job.closed, dict(job.options)) for job in jobs] == [
        ("deebert", False, {}),
        ("deebert", True, {}),
        ("pabee", False, {}),
        ("pabee", False, {"exit0": False}),
    ]


def test_exits_trains_for_exactly_the_listed_exits_beside_one_a_layer() -> None:
    jobs = method_tables.jobs_of("exits", ["trec"], ["shallow_deep"])
    assert [dict(job.options) for job in jobs] == [{}, {}, {"exits": "0,2"}, {"exits": "0,3"}, {"exits": "0,2,4"}]
    assert jobs[0].method == "full" and len({job.section for job in jobs}) == len(jobs)


def test_words_has_one_job_for_every_estimate_of_depths_beside_plain_fine_tuning() -> None:
    jobs = method_tables.jobs_of("words", ["mr"], [])
    assert [job.method for job in jobs] == ["full", "faster_dat", "faster_dat", "faster_dat"]
    assert len({(job.run_name, job.section) for job in jobs}) == len(jobs)


def test_trials_vary_options_and_rates_on_rows_of_their_own(tmp_path: Path) -> None:
    jobs = method_tables.jobs_of("trials", ["sst2-sentences"], ["pabee"])
    assert jobs[0].method == "full" and {job.method for job in jobs[1:]} == {"pabee"}
    assert len({job.run_name for job in jobs}) == len({job.section for job in jobs}) == len(jobs)
    rows = [{"text": f"t{number}", "label": number % 2} for number in range(6200)]
    write_set(tmp_path / "data" / "sst2", train_sentences=rows)
    files = method_tables.split_files(jobs[0], tmp_path / "data", tmp_path)
    texts = {name: {row["text"] for row in read_rows(path)} for name, path in files.items()}
    assert {name: len(found) for name, found in texts.items()} == {"train": 3600, "held-out": 400, "report": 2000}
    assert len(texts["train"] | texts["held-out"] | texts["report"]) == 6000


def test_another_seed_has_runs_and_cells_of_its_own() -> None:
    (first, *_), (second, *_) = ([replace(job, seed=seed) for job in method_tables.jobs_of("defaults", ["mr"], [])]
                                 for seed in (42, 43))  # fmt: skip
    assert first.run_name == "mr-full" and second.run_name == "mr-full-s43"


def test_options_go_to_the_jobs_of_their_method_alone() -> None:
    jobs = method_tables.jobs_of("auto", ["trec"], ["deebert", "length_adaptive"])
    changed = method_tables.with_options(jobs, {"length_adaptive.sandwiches": "1"})
    assert [dict(job.options) for job in changed] == [{}, {}, {}, {"sandwiches": "1"}]
    with pytest.raises(OfframpError, match="no job of it"):
        method_tables.with_options(jobs, {"tr_bert.samples": "3"})


def test_split_files_keeps_folds_and_held_out_rows_apart(tmp_path: Path) -> None:
    rows = [{"text": f"t{number}", "label": number % 2, "fold": number % 10} for number in range(60)]
    write_set(tmp_path / "data" / "mr", all=rows)
    files = method_tables.split_files(method_tables.Job("defaults", "mr", "full"), tmp_path / "data", tmp_path)
    texts = {name: {row["text"] for row in read_rows(path)} for name, path in files.items()}
    assert texts["report"] == {row["text"] for row in rows if row["fold"] == 0}
    assert len(texts["held-out"]) == 5 and not texts["held-out"] & texts["train"]
    assert texts["train"] | texts["held-out"] == {row["text"] for row in rows if row["fold"] != 0}


def test_exit0_study_writes_both_cells_from_one_training(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = method_tables.StudySet("train", "test", given={"epochs": 1, "batch_size": 8})
    monkeypatch.setitem(method_tables.SETS, "trec", few)
    write_set(
        tmp_path / "data" / "trec",
        train=factories.labelled_rows("classification", 60),
        test=factories.labelled_rows("classification", 20, 1),
    )
    words = ["exit0", "--data", str(tmp_path / "data"), "--runs", str(tmp_path / "runs"), "--model", base]
    command = [*words, "--out", str(tmp_path / "out"), "--only", "trec", "--methods", "deebert"]
    method_tables.main(command)
    files = sorted((tmp_path / "out" / "trec" / "deebert").rglob("*.json"))
    assert [path.parent.name for path in files] == ["with-exit0", "without-exit0"]
    closed = json.loads(files[1].read_text())
    assert all(cell["exit_histogram"].get("0", 0) == 0 for cell in closed)
    method_tables.main(command)  # nothing is trained again
    (table,) = (tmp_path / "out" / "house").glob("exit0-*.json")
    assert len(json.loads(table.read_text())["table"]) == 2


def test_cells_of_auto_lie_under_the_method_that_it_chose(tmp_path: Path) -> None:
    job, other = (method_tables.Job("auto", "trec", name, section="auto") for name in ("auto", "deebert"))
    assert method_tables.cell_file(job, tmp_path, "minilm-s42.json") is None
    path = method_tables.cell_path(job, tmp_path, "minilm-s42.json", "fastbert")
    assert path == tmp_path / "trec" / "fastbert" / "auto" / "auto-minilm-s42.json"
    path.parent.mkdir(parents=True)
    path.write_text("[]")
    assert method_tables.cell_file(job, tmp_path, "minilm-s42.json") == path
    assert method_tables.cell_file(other, tmp_path, "minilm-s42.json") is None
