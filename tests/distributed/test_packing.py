"""Predicted work: learned from earlier rows by length, and 1 where nothing is known."""

from __future__ import annotations

import numpy as np
import pytest

from offramp.data.tokenization import Encoded
from offramp.distributed.packing import ENOUGH_ROWS, PredictedShare


def rows(count: int, length: int) -> list[Encoded]:
    """Return rows of one length."""
    return [Encoded([1] * length, [0] * length, number, [], [], 0) for number in range(count)]


def test_shares_are_learned_by_length() -> None:
    share = PredictedShare()
    assert share(20) == share(600) == 1.0
    share.observe(rows(ENOUGH_ROWS - 1, 20), np.full(ENOUGH_ROWS - 1, 30.0), np.full(ENOUGH_ROWS - 1, 100.0))
    assert share(20) == 1.0, "too few rows"
    share.observe(rows(1, 17), np.array([30.0]), np.array([100.0]))
    assert share(20) == share(31) == pytest.approx(0.3)
    assert share(32) == share(15) == 1.0, "lengths of which nothing is known"
