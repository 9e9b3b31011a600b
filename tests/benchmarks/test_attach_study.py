"""`benchmarks/attach_study.py` on a tiny model: its parts, its intervals and its fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import offramp
from benchmarks import attach_study
from offramp.training import attach as training
from tests import factories

FIELDS = {"method", "model", "data", "rows", "seed", "engine", "precision", "hardware", "command", "version", "date"}


@pytest.fixture(scope="module")
def fine_tuned(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fine-tuned")
    train = factories.write_jsonl(folder / "train.jsonl", factories.labelled_rows("classification", 300))
    offramp.train(model=base, train=train, out=folder / "run", epochs=4, lr=0.003, batch_size=16)
    return folder / "run"


def test_the_interval_is_clopper_pearson() -> None:
    assert attach_study.interval(0, 500) == [0.0, pytest.approx(0.00735, abs=1e-5)]
    assert attach_study.interval(5, 500) == [pytest.approx(0.003256, abs=1e-5), pytest.approx(0.023178, abs=1e-4)]
    assert attach_study.interval(4, 4)[1] == 1.0


def test_the_study_writes_all_parts(fine_tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EPOCHS", 6)
    files = {
        name: factories.write_jsonl(tmp_path / f"{name}.jsonl", factories.labelled_rows(kind, count, seed))
        for name, kind, count, seed in [
            ("texts", "classification", 300, 5),
            ("test", "classification", 240, 6),
            ("wrong", "masked_lm", 200, 7),
        ]
    }
    options = [
        "--model",
        fine_tuned,
        "--text",
        files["texts"],
        "--test",
        files["test"],
        "--json",
        tmp_path / "out.json",
    ]
    more = ["--texts", "100,200", "--wrong", files["wrong"], "--resample", 3, "--risk", 0.1, "--exits", "1,2"]
    attach_study.main([str(word) for word in [*options, *more]])
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert set(found) >= FIELDS and str(tmp_path) not in json.dumps(found)
    assert [entry["texts"] for entry in found["by_texts"]] == [80, 160], "a fifth of the texts is held out"
    for cell in [*found["attached"]["points"], *found["wrong_texts"]["repaired"]["points"]]:
        low, high = cell["interval"]
        assert low <= cell["disagreement"] <= high and 0.0 < cell["macs"]["share_of_full"] <= 1.1
        assert "accuracy" in cell["metrics"] and cell["seconds"] > 0.0
    resampled = found["resampled_risk"]
    assert resampled["resamplings"] == 3 and 0 <= resampled["violations"] <= 3
