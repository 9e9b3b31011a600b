"""Risk guarantees: over many calibration sets they are broken no more often than they may be."""

from __future__ import annotations

import numpy as np
import pytest

from offramp import methods
from offramp.calibration import risk as risks
from offramp.errors import OfframpError

TRUE_RISKS = np.linspace(0.0, 0.2, 21)  # of 21 settings, from careful to cheap


@pytest.mark.parametrize("binary", [True, False])
def test_learn_then_test_is_violated_at_most_as_often_as_allowed(binary: bool) -> None:
    """400 calibration sets of 300 rows from a source whose risks are known."""
    limit, confidence, violations, chosen = 0.05, 0.9, 0, []
    for trial in range(400):
        uniform = np.random.default_rng(trial).random(300)  # a row behaves alike under all settings, as real rows do

        def evaluate(settings: dict[str, int], uniform: np.ndarray = uniform) -> tuple[np.ndarray, float]:
            wrong = (uniform < TRUE_RISKS[settings["i"]] * (1 if binary else 2)).astype(float)
            return (wrong if binary else wrong / 2), 1.0 - settings["i"] / 40

        proven = risks.learn_then_test([{"i": i} for i in range(21)], evaluate, limit, confidence, binary)
        assert proven is not None
        chosen.append(proven.settings["i"])
        violations += TRUE_RISKS[proven.settings["i"]] > limit
    assert violations / 400 <= 1 - confidence
    assert np.mean(chosen) >= 1.5, "it is not merely always careful"


def test_learn_then_test_stops_at_the_first_failure() -> None:
    losses = {"a": np.zeros(200), "b": np.ones(200), "c": np.zeros(200)}
    proven = risks.learn_then_test([{"s": s} for s in "abc"], lambda s: (losses[s["s"]], 0.5), 0.05, 0.95)
    assert proven is not None and proven.settings == {"s": "a"} and proven.found == 0.0


def test_learn_then_test_returns_none_if_nothing_passes() -> None:
    assert risks.learn_then_test([{"s": 1}], lambda s: (np.ones(50), 0.5), 0.05, 0.95) is None


def test_check_provable_names_the_rows_that_are_needed() -> None:
    assert risks.rows_needed(0.01, 0.95) == 299
    risks.check_provable(0.01, 0.95, 299)
    with pytest.raises(OfframpError, match="598"):
        risks.check_provable(0.01, 0.95, 298)


@pytest.mark.parametrize(("risk", "confidence"), [(0.0, 0.95), (1.0, 0.95), (0.01, 0.2), (0.01, 1.0)])
def test_check_provable_refuses_values_out_of_range(risk: float, confidence: float) -> None:
    with pytest.raises(OfframpError, match="risk"):
        risks.check_provable(risk, confidence, 10_000)


def test_split_in_halves_shares_no_row() -> None:
    finding, testing = risks.split_in_halves(101, seed=0)
    assert set(finding) | set(testing) == set(range(101)) and not set(finding) & set(testing)


def test_p_value_of_binary_losses_is_the_exact_binomial() -> None:
    losses = np.array([1.0] + [0.0] * 99)
    assert risks.p_value(losses, 0.05, binary=True) == pytest.approx(0.95**100 + 100 * 0.05 * 0.95**99)


def test_stricter_thresholds_are_tested_before_the_cheapest_setting_without_a_disagreement() -> None:
    method = methods.get("deebert")
    found = {"threshold": 0.0, "thresholds": (0.4, 0.2), "temperatures": ()}
    ordered = risks.order_by_disagreement(method, lambda _: (np.zeros(10), 0.5), [found])
    assert ordered[-1]["thresholds"] == (0.4, 0.2) and len(ordered) == risks.STEPS_FROM_STRICTEST + 2
    firsts = [settings["thresholds"][0] for settings in ordered]
    assert firsts == sorted(firsts) and 0.0 < firsts[0] < 0.01, "from the strictest on"
