"""The watched guarantee by simulation: drift is noticed, an unchanged stream raises no alarm, bounds cover."""

from __future__ import annotations

import random

import numpy as np
import pytest

from offramp.serving.watch import MeanBound, Watch

LIMIT = 0.02


def stream(
    watch: Watch, rng: random.Random, share: float, answers: int, mean_layer: float = 2.0, idle: bool = False
) -> int | None:
    """Send answers through a watch; return how many there were before the alarm, None if there was none."""
    for number in range(answers):
        if watch.wants(rng.gauss(mean_layer, 1.0), idle) and watch.add(float(rng.random() < share)):
            return number
    return None


@pytest.mark.parametrize("seed", range(4))
def test_an_unchanged_stream_raises_no_alarm_in_fifty_thousand(seed: int) -> None:
    rng = random.Random(seed)
    watch = Watch(LIMIT, rng=rng)
    assert stream(watch, rng, 0.8 * LIMIT, 50_000) is None
    assert watch.reading().lower <= LIMIT


@pytest.mark.parametrize("seed", range(8))
def test_a_drifted_stream_is_noticed_within_five_thousand(seed: int) -> None:
    rng = random.Random(seed)
    watch = Watch(LIMIT, rng=rng)
    assert stream(watch, rng, 0.5 * LIMIT, 10_000) is None
    noticed = stream(watch, rng, 5.0 * LIMIT, 5_000, mean_layer=2.6)
    assert noticed is not None and watch.alarm


def test_drift_is_noticed_in_idle_time_even_if_rows_leave_where_they_did() -> None:
    rng = random.Random(1)
    watch = Watch(0.01, rng=rng)
    assert stream(watch, rng, 0.004, 10_000, idle=True) is None
    assert stream(watch, rng, 0.05, 5_000, idle=True) is not None


@pytest.mark.parametrize("seed", range(8))
def test_drift_is_noticed_under_load_even_if_rows_leave_where_they_did(seed: int) -> None:
    rng = random.Random(seed)
    watch = Watch(LIMIT, rng=rng)
    assert stream(watch, rng, 0.5 * LIMIT, 5_000) is None
    assert stream(watch, rng, 5.0 * LIMIT, 5_000) is not None


@pytest.mark.parametrize(("limit", "rate"), [(None, 0.01), (0.5, 0.01), (0.02, 0.023), (0.001, 0.2)])
def test_sampling_costs_what_the_limit_needs_when_nothing_is_suspicious(limit: float | None, rate: float) -> None:
    rng = random.Random(3)
    watch = Watch(limit, rng=rng)
    stream(watch, rng, 0.0, 5_000)
    assert watch.current_rate() == pytest.approx(rate, abs=1e-3)
    assert watch.current_rate(idle=True) == 0.2
    assert limit is not None or not watch.add(1.0)


def test_nothing_is_sampled_if_nothing_is_to_be() -> None:
    watch = Watch(LIMIT, rate=0.0, idle_rate=0.0)
    assert stream(watch, random.Random(1), 1.0, 2_000, idle=True) is None and watch.samples == 0


def test_a_differing_answer_raises_the_rate_for_a_while() -> None:
    rng = random.Random(4)
    watch = Watch(LIMIT, rng=rng)
    stream(watch, rng, 0.0, 5_000)
    watch.add(1.0)
    assert watch.current_rate() == 0.2
    for _ in range(100):
        watch.add(0.0)
    assert watch.current_rate() < 0.03


@pytest.mark.parametrize("mean", [0.01, 0.1, 0.5])
def test_bounds_cover_the_mean_at_all_times(mean: float) -> None:
    outside = 0
    for seed in range(60):
        rng, bound = random.Random(seed), MeanBound(0.05)
        missed = False
        for number in range(400):
            bound.add(float(rng.random() < mean))
            if number % 40 == 39:
                missed = missed or not bound.lower <= mean <= bound.upper
        outside += missed
    assert outside <= 12, "each end fails with probability 0.05 at most"


def test_bounds_tighten_with_samples() -> None:
    rng, bound = random.Random(5), MeanBound(0.05)
    for _ in range(2000):
        bound.add(float(rng.random() < 0.1))
    assert 0.05 < bound.lower < 0.1 < bound.upper < 0.17


def test_the_upper_end_rises_again_after_a_change_for_the_worse() -> None:
    rng, bound = np.random.default_rng(3), MeanBound(0.02)
    for share, count in ((0.005, 3000), (0.06, 3000)):
        for value in rng.random(count) < share:
            bound.add(float(value))
    assert bound.upper > bound.total / bound.count
