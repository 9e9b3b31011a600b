"""Replayed draws of thresholds: costs, words and BLEU counted by hand; the best of every segment of cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import offramp
from offramp.calibration import calibrate
from offramp.decoding.calibration import (
    WordTable,
    best_per_segment,
    decoder_candidates,
    draw,
    in_place_bleu,
    record_words,
    replay,
)
from offramp.inference.batching import run_encoded
from offramp.nn.batches import Data
from tests import speaking

TABLE = WordTable(
    uncertainty=np.array([[0.1, 0.6, 0.9, 0.2], [0.3, 0.1, 0.8, 0.1]]),
    right=np.array([[1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1]], dtype=bool),
    place=np.array([0, 1, 0, 1]),  # two sentences of two words
    reach=np.array([10.0, 20.0, 30.0]),
    ask=1.0,
)


def test_draws_by_hand() -> None:
    cost, bleu = replay(TABLE, np.array([[0.0, 0.0], [1.0, 1.0], [0.5, 0.0], [0.5, 0.5]]))
    # nobody leaves; all leave first; words 0 and 3 leave first, the others last; word 1 leaves in the middle
    assert cost.tolist() == [30.0, 11.0, (10 + 10 + 30 + 30 + 4) / 4, (10 + 10 + 20 + 30 + 4 + 2) / 4]
    expected = [in_place_bleu(np.array([row], dtype=bool), TABLE.place)[0]
                for row in ([1, 1, 1, 1], [1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1])]  # fmt: skip
    assert bleu.tolist() == expected


def test_bleu_of_ngrams_right_in_place() -> None:
    place = np.array([0, 1, 2, 3, 4, 0, 1, 2, 3])
    right = np.array([[1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1, 1, 1], [0] * 9], dtype=bool)
    # one wrong last word of five: 8 of 9 words, 6 of 7 pairs, 4 of 5 triples, 2 of 3 fours
    by_hand = 100 * np.exp(np.log([8 / 9, 6 / 7, 4 / 5, 2 / 3]).mean())
    assert in_place_bleu(right, place)[:2] == pytest.approx([100.0, by_hand])
    assert in_place_bleu(right, place)[2] < 15.0


def test_the_best_of_every_segment() -> None:
    cost, bleu = np.array([1.0, 1.1, 2.2, 2.3, 3.0]), np.array([5.0, 6.0, 7.0, 7.0, 1.0])
    assert best_per_segment(cost, bleu, segments=2) == [1, 2]  # of equals the cheaper
    drawn = draw(TABLE, 300)
    assert drawn.shape == (300, 2) and drawn.min() >= 0.0 and drawn.max() <= 1.0
    assert (drawn[200:, 0] < 0.3).mean() > 0.3, "ranks of doubts, not only uniform numbers"


def test_a_recording_agrees_with_decoding(spoken: Path) -> None:
    """On a task it has learned, what is replayed with gold words is what happens for real."""
    model = offramp.load(spoken)
    rows = speaking.rows(40, seed=5)
    data = Data(rows, model.prepare(rows))
    table = record_words(model.network, data)
    assert table.right.shape == (3, sum(len(e.target) for e in data.encoded)) and table.right[-1].mean() > 0.95
    for thresholds in ((0.0, 0.0), (1.0, 1.0)):
        settings = model.settings(given={"thresholds": list(thresholds)})
        policy = model.model.method.policy(model.network, settings)
        outcome = run_encoded(model.network, model.engine, policy, data.encoded)
        depth = np.concatenate([answer[:, 1] for answer in outcome.logits])
        assert set(depth.tolist()) == ({3} if thresholds[0] == 0.0 else {1})
    tried = decoder_candidates(model.network, data, draws=300)
    assert {"threshold": 0.5} in tried and len(tried) > 1
    assert all(len(one["thresholds"]) == 2 for one in tried[:-1])
    assert torch.is_inference_mode_enabled() is False


def test_thresholds_are_decoded_on_rows_they_were_not_found_on(spoken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, found, scored = offramp.load(spoken, engine="torch"), speaking.rows(12, 5), [], []
    real_pointer = calibrate.pointer
    monkeypatch.setattr(calibrate, "FEW", 12)
    monkeypatch.setattr(calibrate, "decoder_candidates", lambda _, data: found.extend(data.rows) or [{}])
    monkeypatch.setattr(calibrate, "pointer", lambda s, *a: scored.extend(s.data.rows) or real_pointer(s, *a))
    calibrate.calibrate(model.network, model.model.method, Data(rows, model.prepare(rows)), "rows", "")
    assert sorted(map(id, [*found, *scored])) == sorted(map(id, rows)) and len(found) == len(scored) == 6
