"""`predict_stream`: predictions in order, over many chunks, and into a file only when all are written."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from offramp.commands.predict import PredictOptions, predict, predict_stream
from offramp.errors import OfframpError
from offramp.inference.predictor import CHUNK, Predictor
from tests import factories


@pytest.fixture(scope="module")
def predictor(trained: Path) -> Predictor:
    """The trained run, loaded once."""
    return Predictor.load(trained)


def text_rows(count: int) -> list[dict[str, str]]:
    """Return rows without labels."""
    return [{"text": row["text"]} for row in factories.labelled_rows("classification", count, 9)]


def test_predictions_are_in_order_over_many_chunks(predictor: Predictor, tmp_path: Path) -> None:
    count = 2 * CHUNK + 5  # three chunks of batches of one row
    source, output = factories.write_jsonl(tmp_path / "in.jsonl", text_rows(count)), tmp_path / "new" / "out.jsonl"
    done = predict_stream(predictor, source, str(output), predictor.settings(0.5), PredictOptions(1))
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    expected = predictor.predict(text_rows(count), 0.5, batch_size=1)
    assert answers == json.loads(json.dumps(expected))
    assert done.rows == count and done.truncated == 0
    full = predictor.full_macs(predictor.prepare(text_rows(count)))
    assert done.mac_share == pytest.approx(sum(a["macs"] for a in expected) / full)


def test_predictions_go_to_standard_output(
    predictor: Predictor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predict_stream(
        predictor,
        factories.write_jsonl(tmp_path / "in.jsonl", text_rows(3)),
        None,
        predictor.settings(),
        PredictOptions(2),
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["label"] in ("good", "bad") for line in lines] == [True] * 3


@pytest.mark.parametrize("form", ["{}", "plain"])
def test_rows_come_from_standard_input(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    rows = text_rows(4)
    lines = [json.dumps(row) if form == "{}" else row["text"] for row in rows]
    given = io.TextIOWrapper(io.BytesIO("\n".join(lines).encode()))
    monkeypatch.setattr("sys.stdin", given)
    assert predict_stream(predictor, "-", None, predictor.settings(1.0), PredictOptions()).rows == 4
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert answers == json.loads(json.dumps(predictor.predict(rows, 1.0)))


def test_a_bad_row_leaves_the_old_file_if_strict(predictor: Predictor, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*text_rows(CHUNK + 2), {"text": ""}]
    output = tmp_path / "out.jsonl"
    output.write_text("old answers")
    with pytest.raises(OfframpError) as caught:
        predict_stream(
            predictor,
            factories.write_jsonl(tmp_path / "in.jsonl", rows),
            str(output),
            predictor.settings(),
            PredictOptions(1, strict=True),
        )
    assert f"line {CHUNK + 3}: 'text' is empty" in str(caught.value)
    kept = {"in.jsonl", "out.jsonl", "out.jsonl.partial"}
    assert factories.read_files(tmp_path).keys() == kept and output.read_text() == "old answers"
    assert (tmp_path / "out.jsonl.partial").read_text().count("\n") == CHUNK, "what was answered before"


class StopsEarly:
    """A predictor that is stopped, or fails, at its second chunk."""

    def __init__(self, model: Predictor, stop: BaseException) -> None:
        self.run, self.stop, self.calls = model.run, stop, 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise self.stop
        return self.run(*given)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(28, "No space left"), MemoryError()])
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_answers_before_an_early_stop_are_kept_beside_the_old_file(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException, ending: str
) -> None:
    source = factories.write_jsonl(tmp_path / "in.jsonl", text_rows(CHUNK + 3))
    output, partial = tmp_path / f"out.{ending}", tmp_path / f"out.{ending}.partial"
    output.write_text("old answers")
    monkeypatch.setattr(predictor, "run", StopsEarly(predictor, stop))
    wanted = OfframpError if isinstance(stop, OSError) else type(stop)
    with pytest.raises(wanted), pytest.warns(UserWarning, match=re.escape(str(partial))):
        predict_stream(predictor, source, str(output), predictor.settings(1.0), PredictOptions(1))
    monkeypatch.undo()
    opener: Any = gzip.open if ending.endswith("gz") else open
    with opener(partial, "rt") as file:
        answers = [json.loads(line) for line in file]
    assert answers == json.loads(json.dumps(predictor.predict(text_rows(CHUNK), 1.0, batch_size=1)))
    assert output.read_text() == "old answers" and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_nothing_is_kept_of_a_file_without_answers(predictor: Predictor, tmp_path: Path, name: str) -> None:
    source = factories.write_jsonl(tmp_path / "in.jsonl", [{"text": ""}])
    with pytest.raises(OfframpError, match="is empty"):
        predict_stream(predictor, source, str(tmp_path / name), predictor.settings(), PredictOptions(strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_rows_before_the_damage_of_a_file_are_answered(
    predictor: Predictor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(json.dumps({"text": row["text"], "id": os.urandom(50).hex()}) + "\n" for row in text_rows(600))
    content = gzip.compress(lines.encode())
    (tmp_path / "in.jsonl.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(OfframpError, match="cannot be read"):
        predict_stream(predictor, str(tmp_path / "in.jsonl.gz"), None, predictor.settings(), PredictOptions())
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) > 200 and all("label" in json.loads(answer) for answer in answers)


@pytest.mark.parametrize("name", ["out.jsonl", "out.json", "out", "out.JSONL.GZ", "out.gz"])
def test_the_ending_of_the_output_is_its_format(predictor: Predictor, tmp_path: Path, name: str) -> None:
    source = factories.write_jsonl(tmp_path / "in.jsonl", text_rows(3))
    predict_stream(predictor, source, str(tmp_path / name), predictor.settings(1.0), PredictOptions())
    content = (tmp_path / name).read_bytes()
    text = gzip.decompress(content) if name.lower().endswith("gz") else content
    answers = [json.loads(line) for line in text.splitlines()]
    assert answers == json.loads(json.dumps(predictor.predict(text_rows(3), 1.0)))


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.tsv.gz", "out.xlsx"])
def test_other_endings_are_refused_before_any_work(trained: Path, tmp_path: Path, name: str) -> None:
    source = factories.write_jsonl(tmp_path / "in.jsonl", text_rows(3))
    with pytest.raises(OfframpError, match=r"JSON lines.*\n.*\.jsonl, \.json or \.txt"):
        predict(trained / "not read", source, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_columns_are_renamed_and_long_texts_counted(predictor: Predictor, tmp_path: Path) -> None:
    source = factories.write_jsonl(tmp_path / "in.jsonl", [{"sentence": "good film " * 60}, {"sentence": "a bad film"}])
    options = PredictOptions(8, {"text": "sentence"})
    done = predict_stream(predictor, source, str(tmp_path / "out.jsonl"), predictor.settings(), options)
    assert (done.rows, done.truncated) == (2, 1)


def answered(predictor: Predictor, source: Path, **options: Any) -> list[dict[str, Any]]:
    """Return what is written for the rows of a file."""
    output = source.with_name("answers.jsonl")
    predict_stream(predictor, str(source), str(output), predictor.settings(1.0), PredictOptions(**options))
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_a_bad_row_gets_its_error_and_line_and_the_rest_goes_on(predictor: Predictor, tmp_path: Path) -> None:
    lines = [b'{"text": "good"}', b"", b'{"text": ""}', b"{", b'{"texts": "a"}', b'{"text": "\xff"}', b"[1]"]
    lines += [b'{"text": 5}', b'{"text": "\\ud800"}', b'{"text": "bad"}']
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    answers = answered(predictor, tmp_path / "in.jsonl")
    assert [answer.get("line") for answer in answers] == [None, 3, 4, 5, 6, 7, 8, 9, None]
    assert all("error" in answer and "row 1" not in answer["error"] for answer in answers[1:-1])
    assert [answers[0]["label"], answers[-1]["label"]] == [p["label"] for p in predictor.predict(["good", "bad"], 1.0)]


def test_bad_lines_of_csv_get_their_error(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b'text,id\na film,1\na,film,2\n\xff,3\n"a"x,4\nthe film,5\n')
    answers = answered(predictor, tmp_path / "in.csv", keep=("id",))
    assert [answer.get("line") for answer in answers] == [None, 3, 4, 5, None]
    assert [answers[0]["id"], answers[-1]["id"]] == ["1", "5"]


def test_columns_of_the_input_are_kept(predictor: Predictor, tmp_path: Path) -> None:
    rows = [{"id": 7, "sentence": "a film", "label": "good"}, {"id": 8, "sentence": "", "label": "bad"}]
    source = Path(factories.write_jsonl(tmp_path / "in.jsonl", rows))
    named = {"columns": {"text": "sentence"}}
    first, second = answered(predictor, source, keep=("id", "sentence"), **named)
    assert list(first)[:3] == ["id", "sentence", "label"] and (first["id"], first["sentence"]) == (7, "a film")
    assert (second["id"], second["line"]) == (8, 2)
    first, second = answered(predictor, source, keep=("all",), **named)
    assert first["input_label"] == "good" and second["input_label"] == "bad"
    assert "label" not in second, "an error is no answer"
    assert list(first)[:3] == ["id", "sentence", "input_label"]
    assert answered(predictor, source, keep=("text",), **named)[0]["text"] == "a film", "our name for it"
    with pytest.raises(OfframpError, match="idd"):
        answered(predictor, source, keep=("idd",), **named)


@pytest.mark.parametrize("given", ["columns", "remembered"])
@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_kept_columns_have_the_names_of_the_file(predictor: Predictor, tmp_path: Path, given: str, ending: str) -> None:
    source = tmp_path / f"in.{ending}"
    source.write_text("id,sentence\n7,a film\n" if ending == "csv" else '{"id": "7", "sentence": "a film"}\n')
    options: dict[str, Any] = {given: {"text": "sentence"}}
    for keep in (("sentence", "id"), ("all",)):
        (answer,) = answered(predictor, source, keep=keep, **options)
        assert {name: answer.get(name) for name in ("id", "sentence", "text")} == {
            "id": "7", "sentence": "a film", "text": None}  # fmt: skip


def test_a_column_that_gives_way_to_another_is_kept_as_it_was(predictor: Predictor, tmp_path: Path) -> None:
    source = Path(factories.write_jsonl(tmp_path / "in.jsonl", [{"text": "a bad film", "sentence": "a film"}]))
    (kept,) = answered(predictor, source, keep=("text", "sentence"), columns={"text": "sentence"})
    assert (kept["text"], kept["sentence"]) == ("a bad film", "a film")
    (kept,) = answered(predictor, source, keep=("all",), remembered={"text": "sentence"})
    assert (kept["text"], kept["sentence"]) == ("a bad film", "a film")


@pytest.mark.parametrize(("format", "separator"), [("csv", ","), ("tsv", "\t")])
def test_delimited_rows_come_from_standard_input(
    predictor: Predictor,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    format: str,
    separator: str,
) -> None:
    text = f"id{separator}text\n1{separator}a good film\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    predict_stream(predictor, "-", None, predictor.settings(), PredictOptions(format=format, keep=("id",)))
    answer = json.loads(capsys.readouterr().out)
    assert answer["id"] == "1" and "label" in answer


def test_lines_of_a_pipe_are_answered_as_they_arrive(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    input_reader, input_writer = os.pipe()
    output_reader, output_writer = os.pipe()
    monkeypatch.setattr("sys.stdin", os.fdopen(input_reader))
    monkeypatch.setattr("sys.stdout", os.fdopen(output_writer, "w"))
    settings = predictor.settings()
    answering = threading.Thread(target=predict_stream, args=(predictor, "-", None, settings, PredictOptions()))
    answering.start()
    with os.fdopen(output_reader) as answers, os.fdopen(input_writer, "w") as rows:
        for _ in range(3):  # each row is written only once the one before was answered
            print("a good film", file=rows, flush=True)
            assert json.loads(answers.readline())["label"] in ("good", "bad")
        rows.close()
        answering.join(30)
    assert not answering.is_alive()


def test_an_output_that_is_the_input_is_refused(trained: Path, tmp_path: Path) -> None:
    source = factories.write_jsonl(tmp_path / "in.jsonl", text_rows(2))
    before = Path(source).read_bytes()
    with pytest.raises(OfframpError, match=r"in\.jsonl"):
        predict(trained, source, source)
    assert Path(source).read_bytes() == before
