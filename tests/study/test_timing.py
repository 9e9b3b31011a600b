"""Interleaved timing, on a clock that the test turns."""

from __future__ import annotations

import pytest

from offramp.study import timing


class Clock:
    """Work takes as long as its variant says, and one call is disturbed."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, [("", 0)]

    def work(self, name: str, call: int) -> None:
        self.made.append((name, call))
        self.now += {"slow": 4.0, "fast": 1.0}[name] * call
        if len(self.made) == 6:
            self.now += 100.0


def test_medians_forget_a_disturbed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    assert timing.interleaved(clock.work, ["slow", "fast"], [1, 2], rounds=3) == {"slow": 12.0, "fast": 3.0}


def test_variants_take_turns() -> None:
    clock = Clock()
    timing.interleaved(clock.work, ["slow", "fast"], [1, 2], rounds=1)
    made = clock.made[1:]
    assert len(made) == 2 * 2 * 2  # a round to warm up, a round that counts
    assert [call for _, call in made] == [1, 1, 2, 2, 1, 1, 2, 2]
    assert [name for name, _ in made[::2]] == ["slow", "fast", "fast", "slow"]
