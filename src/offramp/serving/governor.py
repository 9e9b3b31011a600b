"""The governor: cheaper gears when the queue threatens the latency target, back when it is quiet.

It has no clock: `update` receives the time and the predicted wait. Gears are numbered from the cheapest. Where answers
were found to differ too often from the full model's, the cheap gears are closed (`tighten`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

G = TypeVar("G")


@dataclass(frozen=True)
class GovernorSettings:
    """When gears change; times in seconds, waits as shares of the latency target."""

    target: float = 0.05  # the latency target (SLO)
    high: float = 0.5  # a longer predicted wait moves to the next cheaper gear
    alarm: float = 1.0  # a longer one moves to the cheapest at once
    low: float = 0.15  # a shorter one, for `quiet` seconds, moves back by one gear
    hold: float = 0.1  # between two moves to cheaper gears
    quiet: float = 0.5


class Governor(Generic[G]):
    """Chooses one of the gears, cheapest first; `normal` is the one of a quiet server."""

    def __init__(self, gears: Sequence[G], normal: int, settings: GovernorSettings | None = None) -> None:
        self.gears, self.settings = list(gears), settings or GovernorSettings()
        self.normal = self.current = normal
        self.floor = 0  # cheaper gears are closed
        self.moves = 0
        self._moved = float("-inf")
        self._quiet_since: float | None = None

    @property
    def gear(self) -> G:
        """The gear of the moment."""
        return self.gears[self.current]

    def update(self, now: float, wait: float) -> bool:
        """Move at most one gear (or to the cheapest, in an emergency) for a predicted wait; return whether it moved."""
        settings, before = self.settings, self.current
        load = wait / settings.target
        if load <= settings.low:
            if self._quiet_since is None:
                self._quiet_since = now
            if self.current < self.normal and now - self._quiet_since >= settings.quiet:
                self.current += 1
                self._quiet_since = now
        else:
            self._quiet_since = None
            if load >= settings.alarm:
                self.current = min(self.current, self.floor)
            elif load >= settings.high and self.current > self.floor and now - self._moved >= settings.hold:
                self.current -= 1
        self.current = max(self.current, self.floor)
        if self.current != before:
            self._moved = now
            self.moves += 1
        return self.current != before

    def tighten(self, floor: int) -> bool:
        """Close all gears before one, but never the last; return whether any of them was open."""
        floor = min(floor, len(self.gears) - 1)
        if floor <= self.floor:
            return False
        self.floor = floor
        self.normal = max(self.normal, self.floor)
        self.current = max(self.current, self.floor)
        return True
