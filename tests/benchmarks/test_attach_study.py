"""`benchmarks/attach_study.py` on a tiny model: its parts, its intervals and its fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offramp
from benchmarks import attach_study
from offramp.training import attach as training
from tests import factories

FIELDS = {
    "what",
    "method",
    "model",
    "data",
    "rows",
    "seed",
    "engine",
    "precision",
    "hardware",
    "command",
    "version",
    "date",
}


@pytest.fixture(scope="module")
def fine_tuned(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fine-tuned")
    train = factories.write_jsonl(folder / "train.jsonl", factories.labelled_rows("classification", 300))
    offramp.train(model=base, train=train, out=folder / "run", method="full", epochs=4, lr=0.003, batch_size=16)
    return folder / "run"


def test_the_interval_is_clopper_pearson() -> None:
    assert attach_study.interval(0, 500) == [0.0, pytest.approx(0.00735, abs=1e-5)]
    assert attach_study.interval(5, 500) == [pytest.approx(0.003256, abs=1e-5), pytest.approx(0.023178, abs=1e-4)]
    assert attach_study.interval(4, 4)[1] == 1.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    return {
        name: str(factories.write_jsonl(folder / f"{name}.jsonl", factories.labelled_rows(kind, count, seed)))
        for name, kind, count, seed in [
            ("texts", "classification", 300, 5),
            ("test", "classification", 240, 6),
            ("wrong", "masked_lm", 200, 7),
        ]
    }


@pytest.fixture
def study(
    fine_tuned: Path, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Return a function that runs one study and reads what it wrote."""
    monkeypatch.setattr(training, "EPOCHS", 6)

    def run(name: str, *more: object) -> Any:
        options = ["--model", fine_tuned, "--text", files["texts"], "--test", files["test"], "--exits", "1,2"]
        attach_study.main([str(word) for word in [name, *options, *more, "--json", tmp_path / "out.json"]])
        text = (tmp_path / "out.json").read_text(encoding="utf-8")
        assert str(tmp_path) not in text and str(fine_tuned.parent) not in text
        return json.loads(text)

    return run


def test_cells_are_the_full_model_every_limit_and_tfidf(
    study: Callable[..., Any], files: dict[str, str], tmp_path: Path
) -> None:
    full, *limits, tfidf = study("cells", "--run", tmp_path / "run", "--train", files["texts"])
    assert full["macs"]["share_of_full"] == 1.0 and tfidf["method"] == "tfidf"
    assert [cell["chosen"]["value"] for cell in limits] == sorted(cell["chosen"]["value"] for cell in limits)
    for cell in limits:
        low, high = cell["disagreement"]["interval"]
        assert low <= cell["disagreement"]["found"] <= high and 0.0 < cell["macs"]["share_of_full"] <= 1.1
        assert {"accuracy"} <= set(cell["metrics"]) and cell["trained"]["held_out"] == 60
    assert len(study("cells", "--run", tmp_path / "run")) == len(limits) + 1, "a run that is there is used again"


def test_counts_of_texts_are_those_given(study: Callable[..., Any]) -> None:
    found = study("texts", "--counts", "100,200", "--costs", "0.5,0.9")
    assert set(found) >= FIELDS
    assert [(one["given"], one["texts"], one["held_out"]) for one in found["by_texts"]] == [
        (100, 80, 20),
        (200, 160, 40),
    ]
    for entry in found["by_texts"]:
        assert [one["cost"] for one in entry["at_cost"]] == [0.5, 0.9]
        assert all(one["mac_share"] <= one["cost"] * 1.2 for one in entry["at_cost"])


def test_points_of_wrong_texts_are_repaired_on_right_ones(study: Callable[..., Any], files: dict[str, str]) -> None:
    found = study("wrong", "--wrong", files["wrong"], "--repair", 150, "--limits", "0.02,0.05")
    assert set(found) >= FIELDS and found["wrong_exits_calibrated_on_right_texts"]["texts"] == 150
    for name in ("attached_with_right_texts", "attached_with_wrong_texts"):
        assert [one["limit"] for one in found[name]] == [0.02, 0.05]


def test_a_risk_is_judged_by_rows_that_the_proof_did_not_draw(study: Callable[..., Any], tmp_path: Path) -> None:
    run = ["--run", tmp_path / "run"]
    study("cells", *run)
    found = study("risk", *run, "--resamplings", 20, "--find-rows", 60, "--proof-rows", 60, "--risk", 0.1)
    assert set(found) >= FIELDS and found["resamplings"] == 20 and found["rows_that_show_the_risk"] == 120
    assert 0 <= found["violations_beyond_noise"] <= found["violations"] <= 20


def test_seconds_of_attaching_stand_beside_those_of_a_pass(study: Callable[..., Any]) -> None:
    found = study("seconds", "--rows", 100)
    assert found["texts"] == 100 and found["seconds"]["pass_fp32"] > 0.0
    assert found["attach_over_pass"]["fp32"] == pytest.approx(
        found["seconds"]["attach"] / found["seconds"]["pass_fp32"], rel=0.5
    )
