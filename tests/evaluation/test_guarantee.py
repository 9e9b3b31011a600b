"""The check of a guarantee counts what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from offramp.commands.calibrate import DisagreementEvaluator
from offramp.errors import OfframpError
from offramp.evaluation import guarantee as module
from offramp.evaluation.guarantee import Draws, broken
from offramp.evaluation.result_cells import Origin
from offramp.inference.operating_points import RiskGuarantee
from offramp.inference.predictor import Predictor
from tests import runs
from tests.test_cli import Call, call, rows

__all__ = ["call"]
ORIGIN = Origin("tiny", "test", "offramp guarantee", {})


def test_proofs_on_drawn_rows_are_tested_on_the_others(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    losses = iter([np.array([1.0, 0.0]), np.array([0.0, 0.0]), np.array([0.0, 0.0]), np.array([1.0, 1.0])])

    def proven(subject: module.CalibrationContext, *_: object) -> RiskGuarantee:
        seen.append(len(subject.data.rows))
        return RiskGuarantee(0.4, 0.9, {"threshold": 0.1}, 5, 0.0, 0.5)

    def tested(subject: module.CalibrationContext, *_: object) -> DisagreementEvaluator:
        seen.append(len(subject.data.rows))
        return lambda settings: (next(losses), 0.5)

    monkeypatch.setattr(module, "prove_risk", proven)
    monkeypatch.setattr(module, "disagreement_evaluator", tested)
    made = broken(Predictor.load(trained), runs.rows("classification", 30, 6), Draws(0.4, 0.9, 20, 4), ORIGIN)
    assert seen == [20, 10] * 4
    assert (made["broken"], made["allowed"], made["departure"]["mean"]) == (0.5, 0.1, 0.375)
    assert made["cheaper_than_full"] == 4 and made["share_of_full"]["p95"] == 0.5 and made["hardware"]


def test_the_command_writes_what_it_found(call: Call, trained: Path) -> None:
    data = rows("many.jsonl", runs.rows("classification", 120, 6))
    given = ["--risk", 0.2, "--confidence", 0.9, "--rows", 60, "--trials", 3, "--json", "found.json"]
    said = call("guarantee", trained, "--data", data, *given)
    assert said.code == 0 and "of 3 proofs were broken" in said.out
    found = json.loads(Path("found.json").read_text())
    assert found["asked_trials"] == 3 and 0 < found["share_of_full"]["mean"] <= 1.0
    assert "many.jsonl" in found["command"] and found["split"] == "many"


def test_what_cannot_be_checked_is_refused(trained: Path, every_task: dict[str, Path]) -> None:
    some = runs.rows("classification", 30, 6)
    for draws, word in ((Draws(0.2, 0.9, 30, 3), "fewer rows"), (Draws(0.01, 0.9, 20, 3), "at least")):
        with pytest.raises(OfframpError, match=word):
            broken(Predictor.load(trained), some, draws, ORIGIN)
    with pytest.raises(OfframpError, match="exit method"):
        broken(Predictor.load(every_task["regression"]), runs.rows("regression", 30), Draws(0.2, 0.9, 20, 3), ORIGIN)
