"""How often early answers differ from the full model's, watched while serving.

A sample of answers is computed again at full depth. For the share of answers that differ, a confidence sequence is
kept: bounds that hold at all times together, after any number. It is the betting construction of Waudby-Smith
and Ramdas, "Estimating means of bounded random variables by betting", Journal of the Royal Statistical Society B 86(1),
2024 (Theorem 1): for a candidate mean m the wealth of a gambler who bets λ ≥ 0 against "the mean is at most m",

    W_t(m) = Π_{i ≤ t} (1 + λ (X_i − m)),   0 ≤ λ < 1/m,

is a non-negative supermartingale if every X_i in [0, 1] has a conditional mean of at most m. By Ville's inequality it
ever reaches 1/α with probability at most α. Wealth is averaged over a few fixed λ (a mixture is again such a process),
so nothing has to be estimated. The lower end of the sequence is the largest m whose wealth has reached 1/α; the upper
end comes from the same bets on 1 − X.

Drift: a mean over months would hide a change of today. A new sequence therefore begins after every `EPOCH` samples, and
sequence k gets the error α · 6 / (π² k²), which sums to α over all of them: the probability that any of them ever
raises a false alarm is at most α (union bound). The alarm is raised when the lower end of one of them passes the limit.

How many answers are sampled depends on the past alone (more while wealth is high, more in idle time), which the
construction allows. An answer that went through all layers cannot differ: it is counted without computing anything.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EPOCH = 50  # samples after which another sequence begins
SEQUENCES = 24  # that run at the same time: the newest ones, and the first
BETS = np.array([0.01, 0.03, 0.1, 0.3, 0.6])  # λ · m
CANDIDATES = np.concatenate([np.geomspace(1e-4, 0.5, 96), np.linspace(0.51, 0.999, 32)])  # means m
SUSPICION = 2.0  # wealth against the limit at which more answers are sampled


class MeanBound:
    """A confidence sequence for the mean of numbers in [0, 1], from its own first sample on."""

    def __init__(self, alpha: float, limit: float | None = None) -> None:
        self.alpha, self.count, self.total = alpha, 0, 0.0
        means = CANDIDATES if limit is None else np.append(CANDIDATES, limit)
        self.means = means
        self._bets = BETS[:, None] / means[None, :]  # [bets, means]; on "the mean is larger"
        self._down = BETS[:, None] / (1.0 - means[None, :])  # on "the mean is smaller"
        self._up_wealth = np.zeros_like(self._bets)  # logarithms
        self._down_wealth = np.zeros_like(self._bets)
        self._highest = np.zeros(len(means))  # largest log wealth so far, per mean
        self._highest_down = np.zeros(len(means))

    def add(self, value: float) -> None:
        """Take one more number."""
        self.count += 1
        self.total += value
        self._up_wealth += np.log1p(self._bets * (value - self.means))
        self._down_wealth += np.log1p(self._down * (self.means - value))
        self._highest = np.maximum(self._highest, _mixture(self._up_wealth))
        self._highest_down = np.maximum(self._highest_down, _mixture(self._down_wealth))

    @property
    def wealth(self) -> float:
        """The present wealth against the limit that was given."""
        return float(np.exp(min(700.0, _mixture(self._up_wealth[:, -1:])[0])))

    @property
    def passed(self) -> bool:
        """Whether the lower end has ever passed the limit that was given."""
        return bool(self._highest[-1] >= math.log(1.0 / self.alpha))

    @property
    def lower(self) -> float:
        """The lower end; each end alone holds with probability 1 − α."""
        beaten = self.means[self._highest >= math.log(1.0 / self.alpha)]
        return float(beaten.max()) if len(beaten) else 0.0

    @property
    def upper(self) -> float:
        """The upper end."""
        beaten = self.means[self._highest_down >= math.log(1.0 / self.alpha)]
        return float(beaten.min()) if len(beaten) else 1.0


def _mixture(wealth: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of the mean wealth over the bets."""
    largest = wealth.max(axis=0)
    return np.asarray(largest + np.log(np.exp(wealth - largest).mean(axis=0)))


@dataclass(frozen=True)
class Reading:
    """The share of differing answers and its bounds, of the sequence with the tightest ones."""

    samples: int
    mean: float
    lower: float
    upper: float
    alarm: bool
    rate: float  # share of answers that is sampled


class Watch:
    """Samples answers of one gear and raises an alarm when they differ from the full model's too often."""

    def __init__(
        self,
        limit: float,
        alpha: float = 0.01,
        rate: float = 0.01,
        idle_rate: float = 0.2,
        rng: random.Random | None = None,
    ) -> None:
        self.limit, self.alpha, self.rate, self.idle_rate = limit, alpha, rate, max(rate, idle_rate)
        self.samples, self.alarm, self.answers = 0, False, 0
        self._rng = rng or random.Random()
        self._begun = 0
        self._first = self._new()  # over everything: its bounds are shown
        self._recent: list[MeanBound] = [self._first]
        self._suspicious = False
        self._exits = _Shift()

    def _new(self) -> MeanBound:
        self._begun += 1
        return MeanBound(self.alpha * 6.0 / (math.pi**2 * self._begun**2), self.limit)

    def wants(self, exit_layer: float, idle: bool) -> bool:
        """Return whether the next answer is sampled; decided before anything is known of it but where it left."""
        chosen = self._rng.random() < self.current_rate(idle)
        self.answers += 1
        self._exits.add(exit_layer)  # counts for the next answers only
        return chosen

    def current_rate(self, idle: bool = False) -> float:
        """Return the share of answers that is sampled now."""
        suspicious = self._suspicious or self._exits.shifted
        return self.idle_rate if idle or suspicious or self.samples < EPOCH else self.rate

    def add(self, disagreement: float) -> bool:
        """Take the disagreement of a sampled answer with the full model's, 0…1; return whether an alarm begins."""
        if self.samples and self.samples % EPOCH == 0:
            self._recent.append(self._new())
            if len(self._recent) > SEQUENCES:
                self._recent.pop(1)
        self.samples += 1
        for bound in self._recent:
            bound.add(min(1.0, max(0.0, disagreement)))
        self._suspicious = max(bound.wealth for bound in self._recent) > SUSPICION
        before = self.alarm
        self.alarm = self.alarm or any(bound.passed for bound in self._recent)
        return self.alarm and not before

    def reading(self) -> Reading:
        """Return the present state; the bounds are those over everything, the lower end the highest of all."""
        lower = max(bound.lower for bound in self._recent)
        mean = self._first.total / self._first.count if self._first.count else 0.0
        return Reading(self.samples, mean, lower, self._first.upper, self.alarm, self.current_rate())


class _Shift:
    """Notices that rows leave at other layers than before: a cheap hint that the inputs have changed."""

    RECENT, LONG, DEVIATIONS, LASTS = 0.02, 0.001, 5.0, 1000

    def __init__(self) -> None:
        self.count, self.left = 0, 0
        self.mean = self.square = self.recent = 0.0

    def add(self, layer: float) -> None:
        self.count += 1
        self.left = max(0, self.left - 1)
        slow = max(self.LONG, 1.0 / self.count)
        fast = max(self.RECENT, 1.0 / self.count)
        self.recent += fast * (layer - self.recent)
        self.mean += slow * (layer - self.mean)
        self.square += slow * (layer * layer - self.square)
        variance = max(1e-6, self.square - self.mean**2)
        error = math.sqrt(variance * self.RECENT / 2.0)  # standard error of an exponential mean
        if self.count > 500 and abs(self.recent - self.mean) > self.DEVIATIONS * error:
            self.left = self.LASTS

    @property
    def shifted(self) -> bool:
        return self.left > 0
