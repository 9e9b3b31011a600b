"""Timing in turns, on a clock that the test controls."""

from __future__ import annotations

import pytest

from offramp.evaluation import timing


class Clock:
    """Work takes a fixed time for each variant, and one call is disturbed."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, [("", 0)]

    def work(self, name: str, call: int) -> None:
        self.calls.append((name, call))
        self.now += {"slow": 4.0, "fast": 1.0}[name] * call
        if len(self.calls) == 6:
            self.now += 100.0


def test_interleaved_medians_ignore_a_disturbed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    assert timing.interleaved(clock.work, ["slow", "fast"], [1, 2], rounds=3) == {"slow": 12.0, "fast": 3.0}


def test_interleaved_variants_alternate() -> None:
    clock = Clock()
    timing.interleaved(clock.work, ["slow", "fast"], [1, 2], rounds=1)
    calls = clock.calls[1:]
    assert len(calls) == 2 * 2 * 2  # a round to warm up, a round that counts
    assert [call for _, call in calls] == [1, 1, 2, 2, 1, 1, 2, 2]
    assert [name for name, _ in calls[::2]] == ["slow", "fast", "fast", "slow"]


class WorkClock:
    """A clock that only work advances."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, list[tuple[str, int]]()

    def work(self, name: str, call: int) -> None:
        self.calls.append((name, call))
        self.now += {"slow": 4.0, "fast": 1.0}[name] + call / 100


def test_time_in_turns_records_every_call_of_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ticked = WorkClock(), list[int]()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    taken = timing.time_in_turns(clock.work, ["slow", "fast"], [1, 2, 3], 2, lambda: ticked.append(1))
    assert taken["slow"].shape == (3, 2) and taken["slow"][:, 0].tolist() == pytest.approx([4.01, 4.02, 4.03])
    assert taken["fast"][:, 1].tolist() == pytest.approx([1.01, 1.02, 1.03])
    assert len(ticked) == timing.turn_count(2, 3, 2) == 4


def test_time_in_turns_starts_each_turn_with_an_untimed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TURN", 2)
    clock = WorkClock()
    timing.time_in_turns(clock.work, ["slow", "fast"], [1, 2, 3], 2)
    first, second = "s1 s1 s2 f1 f1 f2 f3 f3 s3 s3", "f1 f1 f2 s1 s1 s2 s3 s3 f3 f3"  # a call to warm up, then the turn
    assert " ".join(f"{name[0]}{call}" for name, call in clock.calls) == f"{first} {second}"
    assert timing.turn_count(2, 3, 2) == 8
