"""`offramp attach`, and the commands that take a disagreement as their budget."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import offramp
from offramp.errors import OfframpError
from offramp.training import attach as training
from offramp.utils.cache_folder import VARIABLE, cache_folder
from tests import factories
from tests.cli.calls import Call, write_rows


@pytest.fixture(scope="module")
def attached(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with attached exits. Read only; `dev.jsonl` lies beside it."""
    folder = tmp_path_factory.mktemp("attached")
    rows = [{"text": row["text"]} for row in factories.labelled_rows("classification", 300, seed=5)]
    factories.write_jsonl(folder / "dev.jsonl", factories.labelled_rows("classification", 20, seed=6))
    texts = factories.write_jsonl(folder / "texts.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning):
        patch.setattr(training, "EPOCHS", 8)
        return offramp.attach(trained, texts, folder / "run", exits="1,2").folder


def test_attach_prints_the_split_and_the_points(call: Call, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EPOCHS", 4)
    write_rows("texts.jsonl", [{"text": row["text"]} for row in factories.labelled_rows("classification", 200)])
    result = call("attach", trained, "--text", "texts.jsonl", "--out", "run", "--exits", "1,2", "--rows", 150)
    assert result.code == 0 and all(part in result.err for part in ("120 texts", "30 are held out"))
    assert "exits after layer 1, layer 2: " in result.out
    assert "disagree" in result.out and Path("run/offramp.json").is_file()
    assert json.loads(Path("run/points.json").read_text())["data"]["rows"] == 30


def test_attach_keeps_compiled_graphs_where_the_option_says(
    call: Call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OfframpError("a cache", str(cache_folder()), "none")

    monkeypatch.setenv(VARIABLE, "none")
    monkeypatch.setattr("offramp.commands.attach.attach", refuse)
    texts = write_rows("texts.jsonl", [{"text": "a"}])
    result = call("attach", trained, "--text", texts, "--out", "run", "--cache", tmp_path / "graphs")
    assert str(tmp_path / "graphs") in result.err.replace("\n", "")


def test_predict_eval_and_explain_take_a_disagreement(call: Call, attached: Path) -> None:
    data = attached.parent / "dev.jsonl"
    written = call("predict", attached, "--input", data, "--max-disagreement", 0.05)
    rows = [row["text"] for row in factories.labelled_rows("classification", 20, seed=6)]
    expected = offramp.load(attached).predict(rows, max_disagreement=0.05)
    assert written.code == 0
    assert [json.loads(line)["exit_layer"] for line in written.out.splitlines()] == [p["exit_layer"] for p in expected]
    scored = call("eval", attached, "--data", data, "--max-disagreement", 0.05, "--json", "cell.json")
    cell = json.loads(Path("cell.json").read_text())
    assert scored.code == 0 and cell["mean_exit_layer"] == pytest.approx(
        sum(p["exit_layer"] for p in expected) / len(expected), abs=1e-3
    )
    explained = call("explain", attached, rows[0], "--max-disagreement", 0.05)
    assert explained.code == 0 and call("explain", attached, rows[0], "--risk", 0.01).code == 2


@pytest.mark.parametrize("command", ["predict", "eval"])
def test_a_disagreement_beside_a_budget_is_refused(call: Call, attached: Path, command: str) -> None:
    rows = ["--input" if command == "predict" else "--data", attached.parent / "dev.jsonl"]
    result = call(command, attached, *rows, "--max-disagreement", 0.05, "--budget", 0.5)
    assert result.code == 2 and "max_disagreement=0.05" in result.err


def test_a_run_without_disagreement_points_says_so(call: Call, trained: Path) -> None:
    result = call("predict", trained, "--input", trained.parent / "dev.jsonl", "--max-disagreement", 0.05)
    assert result.code == 2 and "0.05" in result.err


def test_bench_measures_a_disagreement_as_a_budget(call: Call, attached: Path) -> None:
    options = ["--engines", "torch", "--against", "", "--precisions", "fp32", "--orders", "given", "--rounds", 1]
    data, budgets = attached.parent / "dev.jsonl", "1.0,max-disagreement=0.05"
    result = call("bench", attached, "--data", data, "--budgets", budgets, "--batch-sizes", "4", *options,
                  "--no-memory", "--json", "bench.json")  # fmt: skip
    assert result.code == 0, result.err
    found = {row["budget"] for row in json.loads(Path("bench.json").read_text())["rows"]}
    assert "max-disagreement=0.05" in {str(budget) for budget in found}


def test_calibrate_takes_texts_without_labels(call: Call, attached: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(attached, tmp_path / "run"))
    write_rows("texts.jsonl", [{"text": row["text"]} for row in factories.labelled_rows("classification", 200, seed=8)])
    result = call("calibrate", run, "--data", "texts.jsonl")
    assert result.code == 0 and "have no 'label'" in result.err
    assert all(part in result.out for part in ("5 %", "agreement", "found on torch fp32", "max_disagreement=0.01"))
    shown = call("info", run)
    assert shown.code == 0 and "5 %" in shown.out and "max_disagreement=0.01" in shown.out
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "Measured on 134 held-out texts" in card and "torch fp32" in card


def test_calibrate_with_labels_keeps_the_points_of_texts(call: Call, attached: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(attached, tmp_path / "run"))
    write_rows("rows.jsonl", factories.labelled_rows("classification", 120, seed=8))
    assert call("calibrate", run, "--data", "rows.jsonl").code == 0
    assert call("predict", run, "--input", "rows.jsonl", "--max-disagreement", 0.05).code == 0
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "accuracy" in card and "How often an answer may differ" in card
