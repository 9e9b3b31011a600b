"""The actor's work, without Ray: added columns, errors of rows, formats, and the schema of every output file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from offramp.distributed.blocks import find_files, input_schema, plan_blocks
from offramp.distributed.manifest import OutputFolder, run_fingerprints
from offramp.distributed.shards import ADDED, COSTS, ShardFormat, added_names
from offramp.distributed.worker import BlockWorker, Job
from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.inference.predictor import Predictor
from offramp.tasks import WindowPool
from tests import factories
from tests.distributed.rows import LONG_TEXT, read_output


def job_for(run: Path, **more: Any) -> Job:
    """Return a job that runs with torch at full depth."""
    return Job(str(run), run_fingerprints(run), Budget.share(1.0), "torch", **more)


def answer(run: Path, source: Path, output: Path, kind: str, block_rows: int = 16, **more: Any) -> list[dict[str, Any]]:
    """Answer all blocks of a file in this process and return their records."""
    files = find_files(source)
    worker = BlockWorker(job_for(run, **more), str(output), ShardFormat(kind, input_schema(files)))
    blocks = plan_blocks(files, block_rows)
    OutputFolder(output, kind).write_manifest({}, blocks)
    return [worker.process(block) for block in blocks]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_rows_stay_and_predictions_are_added(trained: Path, texts: Path, tmp_path: Path, kind: str) -> None:
    records = answer(trained, texts, tmp_path / "out", kind)
    rows, source = read_output(tmp_path / "out"), texts.read_text().splitlines()
    assert len(rows) == sum(record["rows"] for record in records) == len(source) == 100
    bad = {number for number, row in enumerate(rows) if row["error"]}
    assert bad == {7, 31, 60} and sum(record["errors"] for record in records) == 3
    good = [number for number in range(100) if number not in bad]
    expected = Predictor.load(trained, "torch").predict([json.loads(source[number])["text"] for number in good], 1.0)
    for number, prediction in zip(good, expected, strict=True):
        row, before = rows[number], json.loads(source[number])
        assert [str(row[name]) for name in before] == [str(value) for value in before.values()]
        assert row["predicted_label"] == prediction["label"] and int(row["macs"]) == prediction["macs"]
        assert float(row["exit_layer"]) == prediction["exit_layer"]
        assert json.loads(row["scores"]) == pytest.approx(prediction["scores"], abs=1e-6)
    for number in bad:
        assert rows[number]["predicted_label"] in (None, "") and rows[number]["macs"] in (None, "")


def test_all_parquet_files_have_one_schema(trained: Path, texts: Path, tmp_path: Path) -> None:
    answer(trained, texts, tmp_path / "out", "parquet", block_rows=4)  # some blocks with errors, most without
    schemas = [pyarrow.parquet.read_schema(path) for path in sorted((tmp_path / "out").glob("part-*"))]
    assert len(schemas) == 25 and all(schema.equals(schemas[0]) for schema in schemas)
    types = {name: str(schemas[0].field(name).type) for name in ("predicted_label", "scores", "error", "macs")}
    assert types == {"predicted_label": "string", "scores": "string", "error": "string", "macs": "int64"}


def test_parquet_columns_of_any_type_stay_as_they_were(trained: Path, tmp_path: Path) -> None:
    rows = factories.labelled_rows("classification", 20, 3)
    table = pa.table({"text": [row["text"] for row in rows], "vector": [[1.5, float(i)] for i in range(20)],
                      "raw": pa.array([b"\xff"] * 20, pa.large_binary())})  # fmt: skip
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    answer(trained, tmp_path / "in.parquet", tmp_path / "out", "parquet", block_rows=20)
    written = pyarrow.parquet.read_table(tmp_path / "out" / "part-000000.parquet")
    assert written.select(table.column_names).equals(table)
    assert written.column_names == [*table.column_names, *ADDED]


def test_rows_that_do_not_fit_the_first_ones_get_an_error(trained: Path, tmp_path: Path) -> None:
    lines = [*['{"id": 1, "text": "good"}'] * 1000, '{"id": "two", "text": "bad"}', '{"id": 3, "text": "a", "more": 1}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    answer(trained, tmp_path / "in.jsonl", tmp_path / "out", "parquet", block_rows=500)
    rows = read_output(tmp_path / "out")
    assert len(rows) == 1002 and [bool(row["error"]) for row in rows[-3:]] == [False, True, True]
    assert rows[-2]["text"] == "bad" and "more" in rows[-1]["error"]


@pytest.mark.parametrize("kind", ["tagging", "question_answering", "regression", "pairs", "multi_label"])
def test_every_task_has_its_answer_as_text(every_task: dict[str, Path], tmp_path: Path, kind: str) -> None:
    source = every_task[kind].parent / "dev.jsonl"
    answer(every_task[kind], source, tmp_path / "out", "jsonl")
    rows = read_output(tmp_path / "out")
    names = added_names(list(json.loads(source.read_text().splitlines()[0])))
    assert len(rows) == 24 and not any(row["error"] for row in rows)
    assert all(isinstance(row[names[name]], str) for row in rows for name in ("label", "scores"))


def test_columns_are_read_under_other_names(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("sentence\ngood film\nbad film\n")
    answer(trained, tmp_path / "in.csv", tmp_path / "out", "csv", columns={"text": "sentence"})
    assert [list(row) for row in read_output(tmp_path / "out")] == [["sentence", *ADDED]] * 2


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_long_rows_are_read_in_windows(trained: Path, tmp_path: Path, pool: WindowPool) -> None:
    rows: list[dict[str, Any]] = [{"text": "a good film"}, {"text": LONG_TEXT}, {"text": ""}, {"text": "a bad film"}]
    source = Path(factories.write_jsonl(tmp_path / "in.jsonl", rows))
    (record,) = answer(trained, source, tmp_path / "out", "jsonl", long="window", window_pool=pool)
    assert (record["rows"], record["errors"], record["truncated"]) == (4, 1, 0)
    good = [row for row in rows if row["text"]]
    expected = Predictor.load(trained, "torch").predict(good, 1.0, long="window", window_pool=pool)
    answered = [row for row in read_output(tmp_path / "out") if not row["error"]]
    for row, prediction in zip(answered, expected, strict=True):
        assert json.loads(row["scores"]) == pytest.approx(prediction["scores"], abs=1e-6)
        assert {name: row[name] for name in COSTS} == {name: prediction[name] for name in COSTS}
    (record,) = answer(trained, source, tmp_path / "truncated", "jsonl")
    rows = read_output(tmp_path / "truncated")
    assert record["truncated"] == 1 and rows[1]["tokens_kept"] <= 64
    long = Predictor.load(trained, "torch").predict([LONG_TEXT], 1.0)[0]
    assert [row["truncated"] for row in rows] == [0, long["truncated"], None, 0] and long["truncated"] > 0


def test_a_node_with_another_version_or_run_refuses(trained: Path, texts: Path, tmp_path: Path) -> None:
    form = ShardFormat("jsonl", input_schema(find_files(texts)))
    (block, *_) = plan_blocks(find_files(texts), 10)
    for other in (
        replace(job_for(trained), version="9.9"),
        replace(job_for(trained), fingerprints={"model": "other", "points": ""}),
        replace(job_for(trained), run=str(tmp_path / "none")),
    ):
        record = BlockWorker(other, str(tmp_path / "out"), form).process(block)
        assert isinstance(OfframpError(*record["refused"]), OfframpError)
    assert not list(tmp_path.glob("out/part-*"))


def test_a_block_that_cannot_be_read_is_reported_and_not_written(trained: Path, texts: Path, tmp_path: Path) -> None:
    form = ShardFormat("jsonl", input_schema(find_files(texts)))
    (block, *_) = plan_blocks(find_files(texts), 10)
    lost = replace(block, path=str(tmp_path / "lost.jsonl"))
    assert "lost.jsonl" in BlockWorker(job_for(trained), str(tmp_path / "out"), form).process(lost)["failed"]
    assert not list(tmp_path.glob("out/part-*"))
