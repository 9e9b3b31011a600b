"""A result cell has every field that scripts rely on, and its numbers add up."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import offramp
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import Origin, evaluate_setting, hardware
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import read_recipe
from tests.factories import KINDS, labelled_rows

FIELDS = {"method", "settings", "model", "data", "split", "rows", "seed", "metrics", "macs", "mean_exit_layer",
          "exit_histogram", "mean_tokens_kept", "seconds", "engine", "precision", "batch_size", "hardware", "command",
          "version", "date"}  # fmt: skip
METRICS = {"classification": "accuracy", "pairs": "f1", "multi_label": "micro_f1", "regression": "pearson",
           "tagging": "entity_f1", "question_answering": "span_f1", "masked_lm": "perplexity"}  # fmt: skip


def cell(run: Path, kind: str, budget: float | None = None, rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    predictor = Predictor.load(run)
    origin = Origin("tiny", "test", "offramp eval", read_recipe(run))
    return evaluate_setting(
        predictor, rows or labelled_rows(kind, 20, 3), predictor.settings(budget), origin, batch_size=6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_result_cell_has_every_field(every_task: dict[str, Path], kind: str) -> None:
    found = cell(every_task[kind], kind, 1.0)
    assert found.keys() >= FIELDS and json.loads(json.dumps(found)) is not None
    assert METRICS[kind] in found["metrics"]
    assert (found["rows"], found["batch_size"], found["engine"], found["seed"]) == (20, 6, "torch", 42)
    assert (found["data"], found["split"], found["command"]) == ("tiny", "test", "offramp eval")
    assert found["version"] == offramp.__version__ and found["date"] == datetime.date.today().isoformat()
    assert found["macs"]["share_of_full"] == 1.0 and found["mean_exit_layer"] == 3.0
    assert found["exit_histogram"] == {"0": 0, "1": 0, "2": 0, "3": 20}


@pytest.mark.parametrize("kind", ["classification", "tagging", "question_answering"])
def test_exit_histogram_sums_to_the_rows(every_task: dict[str, Path], kind: str) -> None:
    rows = labelled_rows(kind, 20, 3)
    if kind == "question_answering":  # several windows are one row
        rows[0] = {**rows[0], "context": rows[0]["context"] + " the man is good ." * 20}
    run = every_task[kind]
    full, cheap = cell(run, kind, 1.0, rows), cell(run, kind, 0.5, rows)
    for found in (full, cheap):
        assert sum(found["exit_histogram"].values()) == 20
    assert full["macs"]["share_of_full"] == 1.0
    assert cheap["macs"]["mean"] < full["macs"]["mean"]
    assert cheap["macs"]["share_of_full"] == pytest.approx(cheap["macs"]["mean"] / full["macs"]["mean"], abs=1e-3)
    assert cheap["mean_exit_layer"] < 3 and cheap["mean_tokens_kept"] < full["mean_tokens_kept"]
    shares = cheap["tokens_by_layer"]
    assert full["tokens_by_layer"] == [1.0, 1.0, 1.0] and shares == sorted(shares, reverse=True)
    assert sum(shares) / 3 == pytest.approx(cheap["mean_tokens_kept"] / full["mean_tokens_kept"], abs=1e-3)


def test_result_cell_agrees_with_predictions(trained: Path) -> None:
    predictor, rows = Predictor.load(trained), labelled_rows("classification", 20, 3)
    found, predictions = cell(trained, "classification", 0.5, rows), predictor.predict(rows, 0.5)
    right = [prediction["label"] == row["label"] for prediction, row in zip(predictions, rows, strict=True)]
    assert found["metrics"]["accuracy"] == pytest.approx(sum(right) / 20)
    assert found["mean_exit_layer"] == pytest.approx(
        sum(prediction["exit_layer"] for prediction in predictions) / 20, abs=1e-4
    )
    assert found["macs"]["mean"] == pytest.approx(sum(prediction["macs"] for prediction in predictions) / 20, abs=1)
    assert found["settings"].items() >= asdict(predictor.settings(0.5)).items()


def test_truncated_rows_are_counted(trained: Path) -> None:
    long = {"text": "good film " * 60, "label": "good"}
    assert cell(trained, "classification", rows=[long, *labelled_rows("classification", 3)])["truncated_rows"] == 1


def test_unknown_labels_are_refused(trained: Path) -> None:
    with pytest.raises(OfframpError, match="'ugly'"):
        cell(trained, "classification", rows=[{"text": "a film", "label": "ugly"}])


def test_result_cell_names_no_local_folder(trained: Path) -> None:
    assert str(trained.parent) not in json.dumps(cell(trained, "classification"))


def test_hardware_is_one_line() -> None:
    assert "\n" not in hardware() and "thread" in hardware()


def test_result_cell_has_the_training_log(trained: Path) -> None:
    log = cell(trained, "classification")["trained"]["log"]
    assert log and all(entry["loss"] > 0.0 and entry["epoch"] >= 1 for entry in log)
