"""How much work a row is predicted to take, learned from the rows before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offramp.data.tokenization import Encoded
from offramp.inference.batching import Array

ENOUGH_ROWS = 32  # of a length before its mean counts


class PredictedShare:
    """The mean share of the full model's work (MACs) that rows of a length take; 1 until enough were seen.

    Lengths are grouped by powers of two. What is predicted decides only which rows share a batch, and no answer depends
    on that.
    """

    def __init__(self) -> None:
        self.rows, self.spent, self.full = (np.zeros(32) for _ in range(3))

    def __call__(self, length: int) -> float:
        """Return the predicted share of a row with so many tokens."""
        group = length.bit_length()
        return float(self.spent[group] / self.full[group]) if self.rows[group] >= ENOUGH_ROWS else 1.0

    def observe(self, encoded: Sequence[Encoded], macs: Array, full_macs: Array) -> None:
        """Learn from rows: what they took, and what the full model would have taken."""
        groups = np.array([len(one.ids).bit_length() for one in encoded])
        for sums, values in ((self.rows, np.ones(len(groups))), (self.spent, macs), (self.full, full_macs)):
            np.add.at(sums, groups, values)
