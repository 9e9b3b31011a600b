"""Replayed draws of thresholds: cost, tokens and BLEU counted by hand; the best of every range of cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import offramp
from offramp.calibration import calibrate
from offramp.decoding.calibration import (
    TokenRecording,
    best_of_each_cost_range,
    decoder_candidates,
    draw_thresholds,
    in_place_bleu,
    record_tokens,
    replay_draws,
)
from offramp.inference.batching import run_encoded
from offramp.nn.batches import Data
from tests import factories

RECORDING = TokenRecording(
    uncertainty=np.array([[0.1, 0.6, 0.9, 0.2], [0.3, 0.1, 0.8, 0.1]]),
    correct=np.array([[1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1]], dtype=bool),
    position=np.array([0, 1, 0, 1]),  # two sentences of two tokens
    exit_macs=np.array([10.0, 20.0, 30.0]),
    decision_macs=1.0,
)


def test_replay_draws_gives_cost_and_bleu_counted_by_hand() -> None:
    cost, bleu = replay_draws(RECORDING, np.array([[0.0, 0.0], [1.0, 1.0], [0.5, 0.0], [0.5, 0.5]]))
    # none exits early; all exit first; tokens 0 and 3 exit first, the others last; token 1 exits in the middle
    assert cost.tolist() == [30.0, 11.0, (10 + 10 + 30 + 30 + 4) / 4, (10 + 10 + 20 + 30 + 4 + 2) / 4]
    correct = ([1, 1, 1, 1], [1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1])
    expected = [in_place_bleu(np.array([row], dtype=bool), RECORDING.position)[0] for row in correct]
    assert bleu.tolist() == expected


def test_in_place_bleu_equals_a_count_by_hand() -> None:
    position = np.array([0, 1, 2, 3, 4, 0, 1, 2, 3])
    correct = np.array([[1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1, 1, 1], [0] * 9], dtype=bool)
    # one wrong last token of five: 8 of 9 tokens, 6 of 7 pairs, 4 of 5 triples, 2 of 3 fours
    by_hand = 100 * np.exp(np.log([8 / 9, 6 / 7, 4 / 5, 2 / 3]).mean())
    assert in_place_bleu(correct, position)[:2] == pytest.approx([100.0, by_hand])
    assert in_place_bleu(correct, position)[2] < 15.0


def test_best_of_each_cost_range_prefers_the_cheaper_of_equals() -> None:
    cost, bleu = np.array([1.0, 1.1, 2.2, 2.3, 3.0]), np.array([5.0, 6.0, 7.0, 7.0, 1.0])
    assert best_of_each_cost_range(cost, bleu, ranges=2) == [1, 2]


def test_draw_thresholds_mixes_uniform_numbers_and_ranks() -> None:
    drawn = draw_thresholds(RECORDING, 300)
    assert drawn.shape == (300, 2) and drawn.min() >= 0.0 and drawn.max() <= 1.0
    assert (drawn[200:, 0] < 0.3).mean() > 0.3, "uniform numbers alone would give 0.3"


def test_a_recording_of_a_learned_task_agrees_with_decoding(translation_run: Path) -> None:
    model = offramp.load(translation_run)
    rows = factories.translation_rows(40, seed=5)
    data = Data(rows, model.prepare(rows))
    recording = record_tokens(model.network, data)
    assert recording.correct.shape == (3, sum(len(e.target) for e in data.encoded))
    assert recording.correct[-1].mean() > 0.95
    for thresholds in ((0.0, 0.0), (1.0, 1.0)):
        settings = model.settings(given={"thresholds": list(thresholds)})
        policy = model.model.method.policy(model.network, settings)
        outcome = run_encoded(model.network, model.engine, policy, data.encoded)
        depth = np.concatenate([answer[:, 1] for answer in outcome.logits])
        assert set(depth.tolist()) == ({3} if thresholds[0] == 0.0 else {1})


def test_decoder_candidates_end_with_the_published_setting(translation_run: Path) -> None:
    model = offramp.load(translation_run)
    rows = factories.translation_rows(40, seed=5)
    candidates = decoder_candidates(model.network, Data(rows, model.prepare(rows)), draws=300)
    assert candidates[-1] == {"threshold": 0.5} and len(candidates) > 1
    assert all(len(one["thresholds"]) == 2 for one in candidates[:-1])
    assert torch.is_inference_mode_enabled() is False


def test_thresholds_are_scored_on_rows_they_were_not_found_on(
    translation_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = offramp.load(translation_run, engine="torch"), factories.translation_rows(12, 5)
    found: list[object] = []
    scored: list[object] = []
    evaluator = calibrate.point_evaluator
    monkeypatch.setattr(calibrate, "FEW_ROWS", 12)
    monkeypatch.setattr(calibrate, "decoder_candidates", lambda _, data: found.extend(data.rows) or [{}])
    monkeypatch.setattr(calibrate, "point_evaluator", lambda s, *a: scored.extend(s.data.rows) or evaluator(s, *a))
    calibrate.find_operating_points(model.network, model.model.method, Data(rows, model.prepare(rows)), "rows", "")
    assert sorted(map(id, [*found, *scored])) == sorted(map(id, rows)) and len(found) == len(scored) == 6
