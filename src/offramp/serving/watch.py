"""How often early answers differ from the full model's, watched while serving.

A sample of answers is computed again at full depth. For the share of answers that differ, a confidence sequence is
kept: bounds that hold at all times together, after any number. It is the betting construction of Waudby-Smith
and Ramdas, "Estimating means of bounded random variables by betting", Journal of the Royal Statistical Society B 86(1),
2024 (Theorem 1): for a candidate mean m the wealth of a gambler who bets λ ≥ 0 against "the mean is at most m",

    W_t(m) = Π_{i ≤ t} (1 + λ (X_i − m)),   0 ≤ λ < 1/m,

is a non-negative supermartingale if every X_i in [0, 1] has a conditional mean of at most m. By Ville's inequality it
ever reaches 1/α with probability at most α. Wealth is averaged over a few fixed λ (a mixture is again such a process),
so nothing has to be estimated. The lower end of the sequence is the largest m whose wealth has ever reached 1/α: the
highest level that was reached, not today's. The upper end comes from the same bets on 1 − X. Each end alone holds with
probability 1 − α.

Drift: a mean over months would hide a change of today, and a gambler who has played against unchanged answers for
months has nothing left to bet. The lower end is therefore a mixture over the moment at which the gambler begins, too:
the stake w_k is kept until sample k and bet from then on,

    S_t = (S_{t−1} + w_t) (1 + λ (X_t − m)),   W_t = S_t + Σ_{k > t} w_k,   Σ w_k = 1,

which is a non-negative supermartingale that begins at 1, so the same inequality holds for ever, whenever the change
comes (a Shiryaev–Roberts procedure with a finite stake; compare Shin, Ramdas and Rinaldo, "E-detectors", 2022). The
alarm is raised when the lower end passes the limit.

How many answers are sampled depends on the past alone, which the construction allows: enough to meet a fivefold
disagreement soon (`needed_rate`), and the rate of idle time while nothing else is to do, after a differing answer, and
after a change in where rows exit. An answer that went through all layers cannot differ: it costs nothing to count.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

BETS = np.array([0.5, 1.5, 4.0, 12.0])  # λ: best for means that are 1.5, 2.5, 5 and 13 times m
LARGEST_BET = 0.9  # of λ · m
DOWN_BETS = np.array([0.01, 0.03, 0.1, 0.3, 0.6])  # λ · (1 − m), for the upper end
CANDIDATES = np.concatenate([np.geomspace(1e-4, 0.5, 96), np.linspace(0.51, 0.999, 32)])  # means m
FIRST_SAMPLES = 50  # of a gear, taken at the rate of idle time
SUSPICION = 2.0  # wealth of a gambler who began at the best moment, at which answers become suspicious
SUSPICIOUS_SAMPLES = 60  # that are then taken at the rate of idle time, at least
DRIFT = 5.0  # times the limit: a disagreement that must be noticed
SOON = 2000  # answers within which a differing one should have been sampled after such a drift
MISSED = 0.01  # probability that none was


class MeanBound:
    """A confidence sequence for the mean of numbers in [0, 1], whose lower end follows changes."""

    def __init__(self, alpha: float, limit: float | None = None) -> None:
        self.alpha, self.count, self.total = alpha, 0, 0.0
        means = CANDIDATES if limit is None else np.append(CANDIDATES, limit)
        self.means = means
        self._bets = np.minimum(BETS[:, None], LARGEST_BET / means[None, :])  # [bets, means]; on "the mean is larger"
        self._down = DOWN_BETS[:, None] / (1.0 - means[None, :])  # on "the mean is smaller"
        self._up_wealth = np.zeros_like(self._bets)  # of the stakes that were bet
        self._down_wealth = np.zeros_like(self._down)  # logarithms
        self._highest = np.ones(len(means))  # largest wealth so far, per mean
        self._down_now = np.zeros(len(means))  # logarithm of the wealth of today

    def add(self, value: float) -> None:
        """Take one more number."""
        before = _kept_stake(self.count)
        self.count += 1
        self.total += value
        kept = _kept_stake(self.count)
        with np.errstate(over="ignore"):  # wealth may become infinite, which beats every candidate as it should
            self._up_wealth = (self._up_wealth + (before - kept)) * (1.0 + self._bets * (value - self.means))
        self._highest = np.maximum(self._highest, self._up_wealth.mean(axis=0) + kept)
        self._down_wealth += np.log1p(self._down * (self.means - value))
        largest = self._down_wealth.max(axis=0)
        self._down_now = largest + np.log(np.exp(self._down_wealth - largest).mean(axis=0))

    @property
    def passed(self) -> bool:
        """Whether the lower end has ever passed the limit that was given."""
        return bool(self._highest[-1] >= 1.0 / self.alpha)

    @property
    def lower(self) -> float:
        """The lower end; each end alone holds with probability 1 − α."""
        beaten = self.means[self._highest >= 1.0 / self.alpha]
        return float(beaten.max()) if len(beaten) else 0.0

    @property
    def upper(self) -> float:
        """The upper end, for a mean that has not changed.

        The wealth of today decides, not the largest so far: after a change for the worse the end rises again.
        """
        beaten = self.means[self._down_now >= math.log(1.0 / self.alpha)]
        return float(beaten.min()) if len(beaten) else 1.0


def _kept_stake(count: int) -> float:
    """Return the stake that is not bet yet after so many samples; it falls so slowly that late changes are affordable.

    The stake of sample k is about 1 / (k log² k): a change after k samples needs a wealth of k log² k / α.
    """
    return 1.0 / (1.0 + math.log1p(count))


def needed_rate(limit: float) -> float:
    """Return the share of answers at which a drift to `DRIFT` times the limit shows in `SOON` answers."""
    return math.log(1.0 / MISSED) / (min(1.0, DRIFT * limit) * SOON)


@dataclass(frozen=True)
class Reading:
    """The share of differing answers and its bounds."""

    samples: int
    mean: float
    lower: float
    upper: float
    alarm: bool
    rate: float  # share of answers that is sampled


class Watch:
    """Samples answers of one gear and raises an alarm when they differ from the full model's too often.

    `limit` None: nothing raises an alarm, and `rate` is sampled as it is.
    """

    def __init__(
        self,
        limit: float | None,
        alpha: float = 0.02,
        rate: float = 0.01,
        idle_rate: float = 0.2,
        rng: random.Random | None = None,
    ) -> None:
        self.limit, self.alpha, self.idle_rate = limit, alpha, max(rate, idle_rate)
        self.rate = rate if limit is None or rate == 0.0 else min(self.idle_rate, max(rate, needed_rate(limit)))
        self.samples, self.alarm, self.answers = 0, False, 0
        self._rng = rng or random.Random()
        self._bound = MeanBound(alpha, limit)
        self._suspicion = _Suspicion(limit)
        self._exits = _Shift()

    def wants(self, exit_layer: float, idle: bool) -> bool:
        """Return whether the next answer is sampled; decided before anything is known of it but where it left."""
        chosen = self._rng.random() < self.current_rate(idle)
        self.answers += 1
        self._exits.add(exit_layer)  # counts for the next answers only
        return chosen

    def current_rate(self, idle: bool = False) -> float:
        """Return the share of answers that is sampled now."""
        suspicious = self._suspicion.left > 0 or self._exits.shifted
        return self.idle_rate if idle or suspicious or self.samples < FIRST_SAMPLES else self.rate

    def add(self, disagreement: float) -> bool:
        """Take the disagreement of a sampled answer with the full model's, 0…1; return whether an alarm begins."""
        disagreement = min(1.0, max(0.0, disagreement))
        self.samples += 1
        self._bound.add(disagreement)
        self._suspicion.add(disagreement)
        before = self.alarm
        self.alarm = self.alarm or (self.limit is not None and self._bound.passed)
        return self.alarm and not before

    def reading(self) -> Reading:
        """Return the present state."""
        bound = self._bound
        mean = bound.total / bound.count if bound.count else 0.0
        return Reading(self.samples, mean, bound.lower, bound.upper, self.alarm, self.current_rate())


class _Suspicion:
    """Notices that answers may have begun to differ: a gambler who may begin again at any time (CUSUM); no proof."""

    def __init__(self, limit: float | None) -> None:
        self.limit, self.wealth, self.left = limit, 1.0, 0

    def add(self, disagreement: float) -> None:
        if self.limit is None:
            return
        bet = min(DRIFT - 1.0, LARGEST_BET / self.limit)
        self.wealth = max(1.0, self.wealth) * (1.0 + bet * (disagreement - self.limit))
        self.left = SUSPICIOUS_SAMPLES if self.wealth > SUSPICION else max(0, self.left - 1)


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
