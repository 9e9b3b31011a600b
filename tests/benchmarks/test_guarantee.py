"""benchmarks/guarantee.py: proofs on drawn rows are tested on the other rows, and broken ones are counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.guarantee import Trials, repeat_proofs

from benchmarks import guarantee
from offramp.calibration.risk import DisagreementEvaluator
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import Origin
from offramp.inference.operating_points import RiskGuarantee
from offramp.inference.predictor import Predictor
from tests.factories import labelled_rows, write_jsonl

ORIGIN = Origin("tiny", "test", guarantee.PROGRAM, {})


def test_proofs_on_drawn_rows_are_tested_on_the_others(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    losses = iter([np.array([1.0, 0.0]), np.array([0.0, 0.0]), np.array([0.0, 0.0]), np.array([1.0, 1.0])])

    def proven(subject: guarantee.CalibrationContext, *_: object) -> RiskGuarantee:
        counts.append(len(subject.data.rows))
        return RiskGuarantee(0.4, 0.9, {"threshold": 0.1}, 5, 0.0, 0.5)

    def tested(subject: guarantee.CalibrationContext, *_: object) -> DisagreementEvaluator:
        counts.append(len(subject.data.rows))
        return lambda settings: (next(losses), 0.5)

    monkeypatch.setattr(guarantee, "prove_risk", proven)
    monkeypatch.setattr(guarantee, "disagreement_evaluator", tested)
    found = repeat_proofs(
        Predictor.load(trained), labelled_rows("classification", 30, 6), Trials(0.4, 0.9, 20, 4), ORIGIN
    )
    assert counts == [20, 10] * 4
    assert (found["broken"], found["allowed"], found["departure"]["mean"]) == (0.5, 0.1, 0.375)
    assert found["cheaper_than_full"] == 4 and found["share_of_full"]["p95"] == 0.5 and found["hardware"]


def test_script_writes_and_prints_what_it_found(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, kept = write_jsonl(tmp_path / "many.jsonl", labelled_rows("classification", 120, 6)), tmp_path / "found.json"
    words = [str(trained), "--data", data, "--risk", "0.2", "--confidence", "0.9", "--rows", "60", "--trials", "3"]
    monkeypatch.setattr(sys, "argv", ["guarantee.py", *words, "--json", str(kept)])
    guarantee.main()
    assert "of 3 proofs" in capsys.readouterr().out
    found = json.loads(kept.read_text())
    assert found["asked_trials"] == 3 and 0 < found["share_of_full"]["mean"] <= 1.0
    assert "many.jsonl" in found["command"] and found["split"] == "many"


def test_trials_that_cannot_be_run_are_refused(trained: Path, every_task: dict[str, Path]) -> None:
    some = labelled_rows("classification", 30, 6)
    for trials, word in ((Trials(0.2, 0.9, 30, 3), "fewer rows"), (Trials(0.01, 0.9, 20, 3), "at least")):
        with pytest.raises(OfframpError, match=word):
            repeat_proofs(Predictor.load(trained), some, trials, ORIGIN)
    with pytest.raises(OfframpError, match="exit method"):
        repeat_proofs(
            Predictor.load(every_task["regression"]), labelled_rows("regression", 30), Trials(0.2, 0.9, 20, 3), ORIGIN
        )
