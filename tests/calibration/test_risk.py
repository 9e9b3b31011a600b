"""The guarantee holds: over many calibration sets it is broken no more often than it may be."""

from __future__ import annotations

import numpy as np
import pytest

from offramp.calibration import risk as risks
from offramp.errors import OfframpError

TRUE = np.linspace(0.0, 0.2, 21)  # the real risk of 21 settings, from careful to careless


@pytest.mark.parametrize("binary", [True, False])
def test_violations_stay_below_one_minus_confidence(binary: bool) -> None:
    """400 calibration sets of 300 rows on a source whose risks are known."""
    asked, confidence, broken, used = 0.05, 0.9, 0, []
    for trial in range(400):
        rng = np.random.default_rng(trial)
        uniform = rng.random(300)  # one row behaves alike under all settings, as real rows do

        def test(settings: dict[str, int], uniform: np.ndarray = uniform) -> tuple[np.ndarray, float]:
            wrong = (uniform < TRUE[settings["i"]] * (1 if binary else 2)).astype(float)
            return (wrong if binary else wrong / 2), 1.0 - settings["i"] / 40

        proven = risks.learn_then_test([{"i": i} for i in range(21)], test, asked, confidence, binary)
        assert proven is not None
        used.append(proven.settings["i"])
        broken += TRUE[proven.settings["i"]] > asked
    assert broken / 400 <= 1 - confidence
    assert np.mean(used) >= 1.5  # and it is not merely always careful


def test_the_sequence_ends_at_the_first_failure() -> None:
    losses = {"a": np.zeros(200), "b": np.ones(200), "c": np.zeros(200)}
    proven = risks.learn_then_test([{"s": s} for s in "abc"], lambda s: (losses[s["s"]], 0.5), 0.05, 0.95)
    assert proven is not None and proven.settings == {"s": "a"} and proven.found == 0.0


def test_nothing_qualifies() -> None:
    assert risks.learn_then_test([{"s": 1}], lambda s: (np.ones(50), 0.5), 0.05, 0.95) is None


def test_too_few_rows_says_how_many_are_needed() -> None:
    assert risks.rows_needed(0.01, 0.95) == 299
    risks.check_provable(0.01, 0.95, 299)
    with pytest.raises(OfframpError, match="598"):
        risks.check_provable(0.01, 0.95, 298)


@pytest.mark.parametrize(("risk", "confidence"), [(0.0, 0.95), (1.0, 0.95), (0.01, 0.2), (0.01, 1.0)])
def test_impossible_questions_are_refused(risk: float, confidence: float) -> None:
    with pytest.raises(OfframpError, match="risk"):
        risks.check_provable(risk, confidence, 10_000)


def test_halves_share_no_row() -> None:
    find, test = risks.split_in_halves(101, seed=0)
    assert set(find) | set(test) == set(range(101)) and not set(find) & set(test)


def test_binary_losses_use_the_exact_binomial() -> None:
    losses = np.array([1.0] + [0.0] * 99)
    assert risks.p_value(losses, 0.05, binary=True) == pytest.approx(0.95**100 + 100 * 0.05 * 0.95**99)
