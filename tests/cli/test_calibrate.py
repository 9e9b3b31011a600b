"""`offramp calibrate`, and `eval` and `predict` with its points and guarantees, by exit code and output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from offramp.engines import EngineOptions
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from tests.cli.calls import Call, write_rows


def repeated_dev_rows(trained: Path, times: int) -> list[dict[str, Any]]:
    """Return the dev rows so many times that a guarantee becomes possible."""
    return [json.loads(line) for line in (trained.parent / "dev.jsonl").read_text().splitlines()] * times


def test_calibrate_finds_points_that_eval_and_predict_use(call: Call, own: Path, trained: Path) -> None:
    data = write_rows("new.jsonl", repeated_dev_rows(trained, 2))
    result = call("calibrate", own, "--data", data, "--max-loss", 0.02)
    assert result.code == 0 and "max_loss=0.02" in result.out
    points = json.loads((own / "points.json").read_text())
    assert points["data"]["name"].endswith("new.jsonl") and points["guarantees"] == []
    assert "new.jsonl" in (own / "README.md").read_text()
    assert call("eval", own, "--data", data, "--max-loss", 0.02).code == 0
    assert call("predict", own, "--input", data, "--output", "out.jsonl", "--max-loss", 0.02).code == 0


def test_calibrate_proves_a_risk_that_eval_uses(call: Call, own: Path, trained: Path) -> None:
    data = write_rows("new.jsonl", repeated_dev_rows(trained, 30))
    result = call("calibrate", own, "--data", data, "--risk", 0.2, "--confidence", 0.9)
    assert result.code == 0 and "with confidence 0.9" in result.out
    (proven,) = json.loads((own / "points.json").read_text())["guarantees"]
    assert proven["risk"] == 0.2 and proven["found"] <= 0.2 and 0 < proven["mac_share"] <= 1
    assert call("eval", own, "--data", data, "--risk", 0.2).code == 0
    assert "0.2" in call("info", own).out
    refused = call("eval", own, "--data", data, "--risk", 0.01)
    assert refused.code == 2 and "calibrated for these risks: 0.2" in refused.err
    rounded = Predictor.load(own, "torch")
    rounded.how = EngineOptions("bf16")
    with pytest.raises(OfframpError, match="proven in fp32"):
        rounded.settings(risk=0.2)


def test_calibrate_warns_of_training_rows(call: Call, own: Path, trained: Path) -> None:
    result = call("calibrate", own, "--data", trained.parent / "train.jsonl")
    assert result.code == 0 and "was trained on" in result.err
    dev = call("calibrate", own, "--data", trained.parent / "dev.jsonl", "--risk", 0.5, "--confidence", 0.5)
    assert "chosen on" in dev.err


def test_points_of_another_model_are_refused_until_calibrate(
    call: Call, own: Path, trained: Path, every_task: dict[str, Path]
) -> None:
    shutil.copy(every_task["classification"] / "points.json", own / "points.json")
    data = write_rows("new.jsonl", repeated_dev_rows(trained, 2))
    for command, words in (("eval", ["--data", data]), ("predict", ["--input", data]), ("info", [])):
        result = call(command, own, *words)
        assert result.code == 2 and "another model" in result.err and "offramp calibrate" in result.err
    assert call("calibrate", own, "--data", data).code == 0
    assert call("eval", own, "--data", data).code == 0


BAD_CALIBRATION = {
    "too few rows": (["--risk", "0.0001"], ["calibration rows", "at least 59912"]),
    "impossible risk": (["--risk", "2"], ["risk=2"]),
    "bad budget": (["--budget", "7"], ["budget=7"]),
    "bad loss": (["--max-loss", "-1"], ["max_loss=-1"]),
    "search options": (
        ["--iterations", "0", "--mutations", "1", "--crossovers", "2", "--search-rows", "3", "--seed", "0", "--resume"],
        [
            "--iterations 0",
            "--mutations 1",
            "--crossovers 2",
            "--search-rows 3",
            "--seed 0",
            "--resume",
            "add --search",
        ],
    ),
    "resume alone": (["--resume"], ["--resume without --search", "leave it out"]),
    "confidence alone": (["--confidence", "0.9"], ["--confidence 0.9 without --risk"]),
    "percentile alone": (["--percentile", "90"], ["--percentile 90.0 without --latency"]),
    "confidence of a search": (["--search", "--confidence", "0.9"], ["--confidence 0.9 without --risk"]),
    "engine of a search": (["--search", "--engine", "torch"], ["--search and --engine torch"]),
    "two limits": (["--budget", "0.5", "--max-loss", "0.1"], ["give only one of them"]),
}


@pytest.mark.parametrize("what", BAD_CALIBRATION)
def test_calibrate_refuses_bad_input_and_keeps_the_points(what: str, call: Call, own: Path, trained: Path) -> None:
    words, parts = BAD_CALIBRATION[what]
    before = (own / "points.json").read_text()
    result = call("calibrate", own, "--data", write_rows("new.jsonl", repeated_dev_rows(trained, 1)), *words)
    assert result.code == 2 and all(part in result.err for part in parts), result.err
    assert (own / "points.json").read_text() == before
