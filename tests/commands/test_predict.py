"""`predict_stream`: predictions in order, over many chunks, and into a file only when all are written."""

from __future__ import annotations

import io
import json
import os
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
    assert factories.read_files(tmp_path).keys() == {"in.jsonl", "out.jsonl"} and output.read_text() == "old answers"


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
    assert list(first)[:3] == ["id", "text", "label"] and (first["id"], first["text"]) == (7, "a film")
    assert (second["id"], second["line"]) == (8, 2)
    first, second = answered(predictor, source, keep=("all",), **named)
    assert first["input_label"] == "good" and second["label"] == "bad"
    with pytest.raises(OfframpError, match="idd"):
        answered(predictor, source, keep=("idd",), **named)


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
