"""`offramp calibrate` and what its points and proofs are good for, by exit code and output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from offramp.engines import How
from offramp.errors import OfframpError
from offramp.inference.predictor import Predictor
from tests import runs
from tests.test_cli import Call, call, rows

__all__ = ["call"]  # the fixture of the other commands' tests


@pytest.fixture
def own(trained: Path, tmp_path: Path) -> Path:
    """A run that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "own"))


def many(trained: Path, times: int) -> runs.Rows:
    """The dev rows often enough for a guarantee to be possible."""
    return [json.loads(line) for line in (trained.parent / "dev.jsonl").read_text().splitlines()] * times


def test_calibrate_finds_points_and_eval_and_predict_use_them(call: Call, own: Path, trained: Path) -> None:
    data = rows("new.jsonl", many(trained, 2))
    said = call("calibrate", own, "--data", data, "--max-loss", 0.02)
    assert said.code == 0 and "a loss of at most 0.02" in said.out
    points = json.loads((own / "points.json").read_text())
    assert points["data"]["name"].endswith("new.jsonl") and points["guarantees"] == []
    assert "new.jsonl" in (own / "README.md").read_text()
    assert call("eval", own, "--data", data, "--max-loss", 0.02).code == 0
    assert call("predict", own, "--input", data, "--output", "out.jsonl", "--max-loss", 0.02).code == 0


def test_a_proven_risk_is_kept_and_used(call: Call, own: Path, trained: Path) -> None:
    data = rows("new.jsonl", many(trained, 30))
    said = call("calibrate", own, "--data", data, "--risk", 0.2, "--confidence", 0.9)
    assert said.code == 0 and "with confidence 0.9" in said.out
    (proven,) = json.loads((own / "points.json").read_text())["guarantees"]
    assert proven["risk"] == 0.2 and proven["found"] <= 0.2 and 0 < proven["mac_share"] <= 1
    assert call("eval", own, "--data", data, "--risk", 0.2).code == 0
    assert "0.2" in call("info", own).out
    refused = call("eval", own, "--data", data, "--risk", 0.01)
    assert refused.code == 2 and "calibrated for these risks: 0.2" in refused.err
    rounded = Predictor.load(own, "torch")
    rounded.how = How("bf16")
    with pytest.raises(OfframpError, match="proven in fp32"):
        rounded.settings(risk=0.2)


def test_calibration_on_known_rows_is_warned_of(call: Call, own: Path, trained: Path) -> None:
    said = call("calibrate", own, "--data", trained.parent / "train.jsonl")
    assert said.code == 0 and "was trained on" in said.err
    dev = call("calibrate", own, "--data", trained.parent / "dev.jsonl", "--risk", 0.5, "--confidence", 0.5)
    assert "chosen on" in dev.err


def test_points_of_another_model_are_refused_until_it_is_calibrated(
    call: Call, own: Path, trained: Path, every_task: dict[str, Path]
) -> None:
    shutil.copy(every_task["classification"] / "points.json", own / "points.json")
    data = rows("new.jsonl", many(trained, 2))
    for command, words in (("eval", ["--data", data]), ("predict", ["--input", data]), ("info", [])):
        said = call(command, own, *words)
        assert said.code == 2 and "another model" in said.err and "offramp calibrate" in said.err
    assert call("calibrate", own, "--data", data).code == 0
    assert call("eval", own, "--data", data).code == 0


BAD_CALIBRATION = {
    "too few rows": (["--risk", "0.0001"], ["calibration rows", "at least 59912"]),
    "impossible risk": (["--risk", "2"], ["risk=2"]),
    "bad budget": (["--budget", "7"], ["budget=7"]),
    "bad loss": (["--max-loss", "-1"], ["max_loss=-1"]),
    "two wishes": (["--budget", "0.5", "--max-loss", "0.1"], ["give only one of them"]),
}


@pytest.mark.parametrize("what", BAD_CALIBRATION)
def test_bad_calibration_input_is_refused_before_points_change(what: str, call: Call, own: Path, trained: Path) -> None:
    words, parts = BAD_CALIBRATION[what]
    before = (own / "points.json").read_text()
    said = call("calibrate", own, "--data", rows("new.jsonl", many(trained, 1)), *words)
    assert said.code == 2 and all(part in said.err for part in parts), said.err
    assert (own / "points.json").read_text() == before
