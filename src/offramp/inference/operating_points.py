"""Operating points: settings with their cost and score, from which a budget chooses.

A share of the full model's MACs chooses, of the points that cost at most so much, the one that loses least by an upper
confidence bound (if none fits, the cheapest); a share of 1 is the full setting. A loss chooses the cheapest point
whose loss of the metric is at most so much by the same bound; the default is a loss of 0.005. Where the calibration
rows are too few for that, the estimated loss decides, and a warning says so; a smaller loss never gives a cheaper
point. Points that were calibrated without bounds are chosen by the estimate. A risk, a disagreement and a latency
choose among settings that were calibrated for them.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from offramp.errors import OfframpError
from offramp.inference.budget import NAMES, Budget
from offramp.utils import schema
from offramp.utils.files import read_json, write_json

BLOCK_BYTES, BLOCKS = 4096, 256  # what a fingerprint reads of a file of weights: block size, and how many blocks
SIGNED_METRICS = ("pearson", "spearman", "matthews")  # correlations: −1 to 1
LARGEST_SHARE = 100.0  # of the full model's MACs that a setting may cost
TOLERANCE = 1e-9  # of comparisons with a loss that may be exactly reached
AGREEMENT = "agreement"  # the metric of points found without labels: with the full model
EXACT = "fp32"  # the precision in which all engines decide alike


def score_loss(score: float, full: float, higher_is_better: bool, scale: float = 1.0) -> float:
    """Return what a score loses of the full model's, as a share of the best value of the metric, its `scale`.

    Where lower is better (perplexity) it is the share by which the value grows.
    """
    return (full - score) / scale if higher_is_better else (score - full) / max(abs(full), 1e-9)


@dataclass(frozen=True)
class OperatingPoint:
    """One setting with its cost and score on the calibration rows."""

    settings: dict[str, Any]
    mac_share: float  # of the full model's MACs
    score: float  # the task's metric, as expected on new rows
    mean_exit_layer: float
    seen: float | None = None  # the metric on the calibration rows themselves
    error: float = 0.0  # about a standard error of the loss, from the disagreement with the full model
    loss_upper: float | None = None  # upper confidence bound on the loss on new rows; None: not bounded


@dataclass(frozen=True)
class LossBounds:
    """How the bounds on the losses of points were computed."""

    confidence: float  # with which a point that is chosen by its bound loses no more than that
    rows: int | None  # that the losses were measured on; None: the metric has no bound
    family_confidence: float | None = None  # of the largest of the families that share the error; None: as above
    given: int | None = None  # rows that were calibrated on, of which some only find settings; None: as measured

    @property
    def smallest_loss(self) -> float:
        """About the smallest loss that the rows prove.

        They prove it of a setting that changes as many answers as may be lost and loses nothing on balance.
        """
        return math.inf if not self.rows else self._rows_times_loss / self.rows

    def rows_needed(self, loss: float) -> int | None:
        """Return about how many rows to calibrate on prove a loss; None: no number of rows does."""
        share = (self.given or self.rows or 1) / (self.rows or 1)
        return None if loss <= TOLERANCE else math.ceil(share * self._rows_times_loss / loss)

    @property
    def _rows_times_loss(self) -> float:
        spread = NormalDist().inv_cdf(self.family_confidence or self.confidence)
        return ((spread + math.sqrt(spread**2 + 4.0)) / 2.0) ** 2


def decide_alike(found: tuple[str | None, str | None], used: tuple[str, str]) -> bool:
    """Return whether settings found on one engine and precision decide in the same way on another.

    In float32 all engines do; in other precisions only the same engine does. Files of format 1 name neither: float32.
    """
    precision = found[1] or EXACT
    return used[1] == precision and (precision == EXACT or found[0] in (None, used[0]))


@dataclass(frozen=True)
class RiskGuarantee:
    """A setting with a proof: with probability `confidence`, its disagreement with the full model is at most `risk`.

    A guarantee holds for the precision it was proven in, and below float32 for its engine only: in float32 all engines
    decide alike. Guarantees of format 1 name neither and were proven in float32.
    """

    risk: float
    confidence: float
    settings: dict[str, Any]
    rows: int  # that it was tested on
    found: float  # the mean disagreement on those rows
    mac_share: float
    engine: str | None = None
    precision: str | None = None

    def holds_on(self, engine: str, precision: str) -> bool:
        """Return whether the proof covers an engine and a precision."""
        return decide_alike((self.engine, self.precision), (engine, precision))


@dataclass(frozen=True)
class DisagreementPoint:
    """A setting that was chosen to disagree with the full model on at most a share `limit` of the predictions.

    As a guarantee, it was tested for one precision, and below float32 for one engine.
    """

    limit: float
    settings: dict[str, Any]
    mac_share: float
    found: float  # the mean disagreement on the calibration rows
    rows: int
    mean_exit_layer: float | None = None
    engine: str | None = None
    precision: str | None = None
    upper: float | None = None  # upper confidence bound on the disagreement on new rows
    proven: bool = False  # a test showed that the limit holds; else the estimate fits it

    def holds_on(self, engine: str, precision: str) -> bool:
        """Return whether the test covers an engine and a precision."""
        return decide_alike((self.engine, self.precision), (engine, precision))


@dataclass(frozen=True)
class LatencyPoint:
    """A setting that answers a single row, from text to prediction, within so many milliseconds on one machine."""

    milliseconds: float  # the limit
    percentile: float  # of rows that must stay within it
    settings: dict[str, Any]
    predicted: float  # milliseconds at that percentile, by the time model
    measured: float  # the same in a real run
    score: float
    mac_share: float
    engine: str
    precision: str
    threads: int | None  # None: all cores
    hardware: str

    @property
    def how(self) -> tuple[str, str]:
        """Engine and precision."""
        return self.engine, self.precision


@dataclass(frozen=True)
class OperatingPoints:
    """All useful settings of a model, cheapest first; the last is the full setting."""

    metric: str
    higher_is_better: bool
    data: dict[str, Any]  # name, rows, fingerprint
    points: tuple[OperatingPoint, ...]
    guarantees: tuple[RiskGuarantee, ...] = ()
    warnings: tuple[str, ...] = ()  # of the calibration
    latencies: tuple[LatencyPoint, ...] = ()
    scale: float = 1.0  # the best value of the metric: losses are shares of it
    disagreements: tuple[DisagreementPoint, ...] = ()
    engine: str | None = None  # that the points were calibrated on; None: of format 1, which does not say
    precision: str | None = None
    default: dict[str, Any] | None = None  # the budget that is used when none is given: its kind and value
    bounds: LossBounds | None = None  # None: calibrated without bounds, as before version 0.2
    trusted: bool = True  # False: the scores mean nothing (see `warnings`), and a loss chooses the full setting

    def shown_score(self, score: float) -> float:
        """Return an expected score as people read it: not below 0 where the metric cannot be.

        Calibration subtracts from the scores of the luckiest points. The choice among points uses the difference.
        """
        return score if self.metric in SIGNED_METRICS or not self.higher_is_better else max(0.0, score)

    def better(self, a: float, b: float) -> bool:
        """Return whether score `a` beats score `b`."""
        return a > b if self.higher_is_better else a < b

    @property
    def full_point(self) -> OperatingPoint:
        """The full model's own point."""
        return self.points[-1]

    def loss_of(self, point: OperatingPoint) -> float:
        """Return what a point loses of the full model's score, as a share of the best value of the metric.

        Where lower is better (perplexity) it is the share by which the value grows.
        """
        return score_loss(point.score, self.full_point.score, self.higher_is_better, self.scale)

    def choose(self, budget: float | Budget | None = None) -> OperatingPoint:
        """Return the point for a share of compute (a number, or `Budget.share`), a loss, or the default budget."""
        budget = Budget.parse(budget)
        if budget.kind == "default" and self.default_budget.kind != "default":
            budget = self.default_budget
            if budget.kind not in ("share", "loss"):
                return self._point_of(budget)
        if budget.kind == "share":
            return self._within_share(budget.value)
        if budget.kind in ("loss", "default"):
            point, unproven = self.within_loss(budget.value)
            if unproven and budget.kind == "loss":
                warnings.warn(unproven, stacklevel=3)
            return point
        raise OfframpError("an operating point", str(budget), "give a budget or a max_loss")

    def within_loss(self, loss: float) -> tuple[OperatingPoint, str]:
        """Return the cheapest point that loses at most so much, and a sentence if that is not proven, else "".

        The bounds decide. Where the rows are too few to prove such a loss of any cheaper point, the estimates do, among
        the points that are no cheaper than the one for the smallest loss at which the bounds decide: a smaller loss
        never gives a cheaper point.
        """
        if not self.trusted:
            return self.full_point, f"max_loss={loss:g} is answered with the full model: {'; '.join(self.warnings)}"
        if self.bounds is None:
            point = self._estimated_within(loss)
            counted = "answers other than the full model's" if self.metric == AGREEMENT else self.metric
            why = f"these points have no bounds; what is counted is {counted}"
            return point, "" if point == self.full_point else f"max_loss={loss:g} is an estimate and not proven: {why}"
        decisive = min(self.bounds.smallest_loss, *map(_upper, self.points[:-1]), math.inf)
        if loss >= decisive - TOLERANCE:
            return self._proven_within(loss), ""
        if self._estimated_within(loss) == self.full_point:
            return self.full_point, ""
        fitting = self._estimated_within(loss, self._proven_within(decisive).mac_share)
        needed = self.bounds.rows_needed(loss)
        if self.bounds.rows is None:
            why = f"{self.metric} has no confidence bound here"
        elif needed is None:
            why = "no number of rows proves that nothing is lost"
        else:
            given = self.bounds.given or self.bounds.rows
            why = f"{given} calibration rows are too few, about {needed} are needed"
        how = "answered with the full model" if fitting == self.full_point else "an estimate and not proven"
        return fitting, f"max_loss={loss:g} is {how}: {why}"

    def _estimated_within(self, loss: float, least_share: float = 0.0) -> OperatingPoint:
        fitting = (point for point in self.points if self.loss_of(point) <= loss + TOLERANCE)
        return next((point for point in fitting if point.mac_share >= least_share), self.full_point)

    def _proven_within(self, loss: float) -> OperatingPoint:
        return next((point for point in self.points if _upper(point) <= loss + TOLERANCE), self.full_point)

    @property
    def default_budget(self) -> Budget:
        """The budget that the folder uses when none is given."""
        return Budget.default() if self.default is None else Budget(self.default["kind"], self.default["value"])

    def _point_of(self, budget: Budget) -> OperatingPoint:
        """Return the operating point of a default disagreement, risk or latency; refuse one that has no point."""
        if budget.kind == "disagreement":
            found: Any = self.disagreement_point_for(budget.value)
        elif budget.kind == "risk":
            proven = (one for one in self.guarantees if one.risk <= budget.value)
            found = min(proven, key=lambda one: one.mac_share, default=None)
        else:
            timed = (one for one in self.latencies if one.milliseconds <= 1000 * budget.value + TOLERANCE)
            found = max(timed, key=lambda one: one.milliseconds, default=None)
        if found is None:
            given = "a model whose points.json has no point for this default"
            raise OfframpError(str(budget), given, "give a budget, or calibrate again")
        known = [point for point in self.points if point.settings == found.settings]
        return known[0] if known else OperatingPoint(found.settings, found.mac_share, 1.0, 0.0)

    def _within_share(self, share: float) -> OperatingPoint:
        """Return the point that loses least at this share or less; the cheapest, with a warning, if none fits."""
        if share >= 1.0:
            return self.full_point
        fitting = [point for point in self.points if point.mac_share <= share]
        if not fitting:
            cheapest = self.points[0]
            cost = f"{cheapest.mac_share:.3f} of the full compute, expected {self.metric} {cheapest.score:.4f}"
            warnings.warn(f"no point within budget {share}: using the cheapest useful one, {cost}", stacklevel=3)
            return cheapest
        return min(fitting, key=self.order_of_loss)

    def order_of_loss(self, point: OperatingPoint) -> tuple[float, float]:
        """Return what orders points by what they lose: the bound, where there are bounds, then the score.

        Of many settings the one with the best score is often a lucky one; a bound allows for the rows that change.
        """
        score = -point.score if self.higher_is_better else point.score
        bounded = self.bounds is not None and all(other.loss_upper is not None for other in self.points)
        return (point.loss_upper or 0.0 if bounded else 0.0), score

    def guarantee_for(self, risk: float, engine: str, precision: str) -> RiskGuarantee:
        """Return the cheapest setting that was proven to stay within a risk on this engine and precision."""
        fitting = [one for one in self.guarantees if one.risk <= risk]
        command = f"`offramp calibrate RUN --data FILE --risk {risk:g} --confidence 0.95`"
        if not fitting:
            known = ", ".join(f"{one.risk:g}" for one in self.guarantees) or "none"
            given = f"a model calibrated for these risks: {known}"
            raise OfframpError(f"settings with a guaranteed risk of {risk:g}", given, f"run {command} first")
        holding = [one for one in fitting if one.holds_on(engine, precision)]
        if not holding:  # other numbers, other decisions: the proof does not cover them
            proven = sorted({one.precision or EXACT for one in fitting})
            given = f"{engine} in precision {precision}, and the risk was proven in {' and '.join(proven)}"
            raise OfframpError(f"a guaranteed risk of {risk:g}", given, f"use {proven[0]}, or give a budget")
        return min(holding, key=lambda one: one.mac_share)

    def holds_on(self, engine: str, precision: str) -> bool:
        """Return whether the bounds on losses cover an engine and a precision."""
        return decide_alike((self.engine, self.precision), (engine, precision))

    def disagreement_point_for(self, limit: float, how: tuple[str, str] | None = None) -> DisagreementPoint:
        """Return the cheapest setting that was calibrated for at most this disagreement with the full model.

        Points that were tested on this engine and precision (`how`) come first; without any, those of another.
        """
        fitting = [one for one in self.disagreements if one.limit <= limit + 1e-12]
        here = [one for one in fitting if how is not None and one.holds_on(*how)]
        fitting = here or fitting
        if not fitting:
            known = ", ".join(f"{one.limit:g}" for one in self.disagreements) or "none"
            raise OfframpError(
                f"settings that disagree with the full model in at most {limit:g} of all predictions",
                f"a model with points for these disagreements: {known}",
                "give a budget, a max_loss or a proven risk instead",
            )
        return min(fitting, key=lambda one: one.mac_share)

    def latency_point_for(self, seconds: float, engine: str, precision: str) -> LatencyPoint:
        """Return the best setting that was shown to answer in time on this engine and precision."""
        ms = 1000 * seconds
        fitting = [one for one in self.latencies if one.milliseconds <= ms + 1e-9 and one.how == (engine, precision)]
        if not fitting:
            known = ", ".join(f"{one.milliseconds:g}ms on {' '.join(one.how)}" for one in self.latencies) or "none"
            options = f"--latency {ms:g}ms --engine {engine} --precision {precision}"
            raise OfframpError(
                f"answers within {ms:g}ms on {engine} {precision}",
                f"a model calibrated for these latencies: {known}",
                f"run `offramp calibrate RUN --data FILE {options}` here first",
            )
        return max(fitting, key=lambda one: one.milliseconds)


def _upper(point: OperatingPoint) -> float:
    return math.inf if point.loss_upper is None else point.loss_upper


def threads_in_words(threads: int | None) -> str:
    """Return a number of threads in words."""
    return "all cores" if threads is None else f"{threads} thread{'s' * (threads > 1)}"


def pareto_front(
    points: Sequence[OperatingPoint], full_point: OperatingPoint, higher_is_better: bool
) -> tuple[OperatingPoint, ...]:
    """Return the points that no other beats on cost, score and bound together, cheapest first, the full one last.

    Without bounds on the losses, cost and score alone decide.
    """
    sign = 1.0 if higher_is_better else -1.0
    kept: list[OperatingPoint] = []
    for point in sorted(points, key=lambda p: (p.mac_share, -sign * p.score, _upper(p))):
        if not any(sign * other.score >= sign * point.score and _upper(other) <= _upper(point) for other in kept):
            kept.append(point)
    # points that cost more than the full model (exit heads at which no row leaves) are useless
    return (*[p for p in kept if p.mac_share < full_point.mac_share], full_point)


def weights_fingerprint(folder: Path) -> str:
    """Return a fingerprint of a folder's weights.

    It reads sizes, headers and blocks spread over every file, so that it takes milliseconds and two trainings still
    differ.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in dict.fromkeys(size * block // BLOCKS for block in range(BLOCKS)):
                file.seek(place)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


def save_points(folder: Path, points: OperatingPoints) -> None:
    """Write points.json beside the weights it belongs to."""
    write_json(folder / "points.json", {**asdict(points), "model": weights_fingerprint(folder)})


def load_points(folder: Path) -> OperatingPoints:
    """Read points.json, which must belong to the weights beside it."""
    stored = read_json(folder / "points.json")
    owner = stored.get("model") if isinstance(stored, dict) else None
    if owner is not None and owner != weights_fingerprint(folder):
        raise OfframpError(
            f"the operating points of {folder}",
            "a points.json that was calibrated for another model: its settings mean nothing to these weights",
            f"run `offramp calibrate {folder} --data FILE`, or put back the points.json of this model",
        )
    try:
        points = schema.from_json(OperatingPoints, stored, ignore_unknown=True)
        _check_points(points)
    except schema.SchemaError as error:
        given = f"a damaged points.json in {folder} ({error})"
        raise OfframpError("operating points", given, "restore it, or calibrate or train again") from error
    return points


def _check_points(points: OperatingPoints) -> None:
    """Refuse values that no calibration writes."""
    if not points.points:
        raise schema.SchemaError("points is empty")
    rows = points.data.get("rows")
    if not isinstance(rows, int) or isinstance(rows, bool) or not isinstance(points.data.get("name"), str):
        raise schema.SchemaError("data lacks the name and the number of the rows")
    if not points.scale > 0.0:
        raise schema.SchemaError(f"scale is {points.scale}")
    calibrated: list[Any] = [*points.points, *points.guarantees, *points.latencies, *points.disagreements]
    wrong = [one.mac_share for one in calibrated if not 0.0 <= one.mac_share <= LARGEST_SHARE]
    if wrong:
        raise schema.SchemaError(f"a share of MACs is {wrong[0]}")
    if points.bounds is not None and not 0.0 < points.bounds.confidence < 1.0:
        raise schema.SchemaError(f"the confidence of bounds is {points.bounds.confidence}")
    if points.default is not None:
        kind, value = points.default.get("kind"), points.default.get("value")
        if kind not in (*NAMES, "default"):
            raise schema.SchemaError(f"default.kind is {kind!r:.60}")
        if kind != "latency":
            schema.checked(float, value, "default.value")
        elif not isinstance(value, str | float | int):
            raise schema.SchemaError(f"default.value is {value!r:.60}")
        try:
            _ = Budget.default() if kind == "default" else Budget.parse(**{NAMES[kind]: value})
        except OfframpError as error:
            raise schema.SchemaError(f"default.value is {value!r:.60}") from error
