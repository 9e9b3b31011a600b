"""Points in terms of disagreement with the full model: which exits are worth their time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from offramp import methods
from offramp.calibration.calibrate import CalibrationContext
from offramp.calibration.disagreement import choose_exits
from offramp.calibration.replay import ExitOutcomes, record_exits
from tests import factories

ROWS = 600


def test_exits_are_chosen_for_all_rows_that_may_leave_there() -> None:
    """Nine rows in ten may leave at exit 0 and the rest needs every layer: 0.1 × 3 layers of 1 ms is the mean time."""
    network, data = factories.network("attached"), factories.data()
    uncertainty = (np.arange(ROWS) / ROWS).astype(np.float32).astype(np.float64)
    score = np.ones((4, ROWS))  # exits 0, 1 and 2, and the full model
    score[:3, ROWS * 9 // 10 :] = 0.0
    cost, layers = np.ones((4, ROWS)), np.arange(4)
    outcomes = ExitOutcomes(
        layers, score, 1.0 - score, score, cost, cost[:3], np.zeros((3, ROWS)), np.ones(ROWS), torch.zeros(ROWS)
    )
    recording = replace(record_exits(network, data), outcomes=outcomes)
    context = CalibrationContext(network, methods.get("attached"), data)
    chosen, compared = choose_exits(context, recording, np.stack([uncertainty] * 3), 1.0, [0.001] * 3, limit=0.0)
    assert chosen == [0]
    assert compared["0"] == pytest.approx(0.3, abs=0.05)
