"""A guarantee: on new rows from the same source, an adaptive model departs from its full model at most so often.

Learn-then-Test: candidate settings come from one half of the calibration rows and are ordered from the most careful to
the cheapest; on the other half each must show, by an exact binomial test (a Hoeffding–Bentkus bound where the loss is
not 0 or 1), that its risk is at most what was asked. The first that cannot ends the sequence, so all tests together
fail with probability at most 1 − confidence. Candidates and tests never share a row.

The loss of a row is 1 when the label differs (classification), the share of words whose tag differs (tagging), one
minus the word F1 of the two answers (span), and the absolute difference capped at 1 (regression).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from offramp.errors import OfframpError
from offramp.inference.operating_points import RiskGuarantee

Losses = NDArray[np.float64]


def rows_needed(risk: float, confidence: float) -> int:
    """How many rows without a single disagreement prove a risk: fewer cannot prove anything."""
    return math.ceil(math.log(1.0 - confidence) / math.log(1.0 - risk))


def check_provable(risk: float, confidence: float, rows: int) -> None:
    """Refuse what cannot be asked or proven."""
    if not 0.0 < risk < 1.0 or not 0.5 <= confidence < 1.0:
        raise OfframpError(
            "a risk and a confidence", f"risk={risk}, confidence={confidence}", "use e.g. --risk 0.01 --confidence 0.95"
        )
    need = rows_needed(risk, confidence)
    if rows < need:
        raise OfframpError(
            f"a risk of {risk} with confidence {confidence}",
            f"{rows} rows to test it on (half of the calibration rows)",
            f"give at least {2 * need} calibration rows, or ask for a larger risk or a smaller confidence",
        )


def p_value(losses: Losses, risk: float, whole: bool) -> float:
    """How likely losses this small are if the true risk were above `risk`; `whole`: the task's losses are 0 or 1.

    Which test is used must not depend on the losses seen, or the two would share one promise.
    """
    n, mean = len(losses), float(losses.mean())
    if whole:
        return float(binom.cdf(round(losses.sum()), n, risk))
    if mean >= risk:
        return 1.0
    divergence = mean * math.log(mean / risk) if mean > 0 else 0.0
    divergence += (1 - mean) * math.log((1 - mean) / (1 - risk))
    bentkus = math.e * float(binom.cdf(math.ceil(n * mean), n, risk))
    return min(1.0, math.exp(-n * divergence), bentkus)


def split_in_halves(rows: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row indices for finding candidates, and for testing them."""
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(order[: rows // 2]), np.sort(order[rows // 2 :])


def learn_then_test(
    candidates: Sequence[dict[str, Any]],
    test: Callable[[dict[str, Any]], tuple[Losses, float]],
    risk: float,
    confidence: float,
    whole: bool = True,
) -> RiskGuarantee | None:
    """Test candidates, most careful first, until one fails; `test` gives losses on the testing half and MAC share."""
    best: RiskGuarantee | None = None
    for settings in candidates:
        losses, share = test(settings)
        if p_value(losses, risk, whole) > 1.0 - confidence:
            break
        best = RiskGuarantee(risk, confidence, settings, len(losses), float(losses.mean()), share)
    return best
