"""`predict_stream`: predictions in order, over many chunks, and into a file only when all are written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from offramp.commands.predict import predict_stream
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
    done = predict_stream(predictor, source, str(output), predictor.settings(0.5), 1, {})
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
        predictor, factories.write_jsonl(tmp_path / "in.jsonl", text_rows(3)), None, predictor.settings(), 2, {}
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
    assert predict_stream(predictor, "-", None, predictor.settings(1.0), 32, {}).rows == 4
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert answers == json.loads(json.dumps(predictor.predict(rows, 1.0)))


def test_a_bad_row_leaves_the_old_file(predictor: Predictor, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*text_rows(CHUNK + 2), {"text": ""}]
    output = tmp_path / "out.jsonl"
    output.write_text("old answers")
    with pytest.raises(OfframpError) as caught:
        predict_stream(
            predictor, factories.write_jsonl(tmp_path / "in.jsonl", rows), str(output), predictor.settings(), 1, {}
        )
    assert f"counted from row {CHUNK + 1}" in str(caught.value) and "row 3: 'text' is empty" in str(caught.value)
    assert factories.read_files(tmp_path).keys() == {"in.jsonl", "out.jsonl"} and output.read_text() == "old answers"


def test_columns_are_renamed_and_long_texts_counted(predictor: Predictor, tmp_path: Path) -> None:
    source = factories.write_jsonl(tmp_path / "in.jsonl", [{"sentence": "good film " * 60}, {"sentence": "a bad film"}])
    done = predict_stream(predictor, source, str(tmp_path / "out.jsonl"), predictor.settings(), 8, {"text": "sentence"})
    assert (done.rows, done.truncated) == (2, 1)
