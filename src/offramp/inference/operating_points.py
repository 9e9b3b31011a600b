"""Operating points: settings with their cost and score, from which a budget chooses.

A share of the full model's MACs chooses the most accurate point that costs at most so much, else the cheapest; a share
of 1 is the full setting. A loss chooses the cheapest point that loses at most so much of the metric; the default is a
loss of 0.005. A risk, a disagreement and a latency choose among settings that were calibrated for them.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.utils.files import read_json, write_json

BLOCK_BYTES, BLOCKS = 4096, 256  # what a fingerprint reads of a file of weights: block size, and how many blocks
SIGNED_METRICS = ("pearson", "spearman", "matthews")  # correlations: −1 to 1
EXACT = "fp32"  # the precision in which all engines decide alike


@dataclass(frozen=True)
class OperatingPoint:
    """One setting with its cost and score on the calibration rows."""

    settings: dict[str, Any]
    mac_share: float  # of the full model's MACs
    score: float  # the task's metric, as expected on new rows
    mean_exit_layer: float
    seen: float | None = None  # the metric on the calibration rows themselves
    error: float = 0.0  # about a standard error of the loss, from the disagreement with the full model


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
        proven = self.precision or EXACT
        return precision == proven and (proven == EXACT or self.engine in (None, engine))


@dataclass(frozen=True)
class DisagreementPoint:
    """A setting that was chosen to disagree with the full model on at most a share `limit` of the predictions."""

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

    def __post_init__(self) -> None:
        """Raise expected scores to the least value of the metric: what is subtracted for luck must not pass it."""
        if self.higher_is_better and self.metric not in SIGNED_METRICS:
            raised = tuple(point if point.score >= 0.0 else replace(point, score=0.0) for point in self.points)
            object.__setattr__(self, "points", raised)

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
        loss = (self.full_point.score - point.score) / self.scale
        return loss if self.higher_is_better else -loss / max(abs(self.full_point.score), 1e-9)

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
            fitting = (point for point in self.points if self.loss_of(point) <= budget.value + 1e-9)
            return next(fitting, self.full_point)
        raise OfframpError("an operating point", str(budget), "give a budget or a max_loss")

    @property
    def default_budget(self) -> Budget:
        """The budget that the folder uses when none is given."""
        return Budget.default() if self.default is None else Budget(self.default["kind"], self.default["value"])

    def _point_of(self, budget: Budget) -> OperatingPoint:
        """Return the operating point of a default disagreement, risk or latency."""
        if budget.kind == "disagreement":
            found: Any = self.disagreement_point_for(budget.value)
        elif budget.kind == "risk":
            found = min((one for one in self.guarantees if one.risk <= budget.value), key=lambda one: one.mac_share)
        else:
            found = self.latencies[0]
        known = [point for point in self.points if point.settings == found.settings]
        return known[0] if known else OperatingPoint(found.settings, found.mac_share, 1.0, 0.0)

    def _within_share(self, share: float) -> OperatingPoint:
        """Return the most accurate point that costs at most this share; the cheapest, with a warning, if none does."""
        if share >= 1.0:
            return self.full_point
        fitting = [point for point in self.points if point.mac_share <= share]
        if not fitting:
            cheapest = self.points[0]
            warnings.warn(
                f"no point within budget {share}: using the cheapest, {cheapest.mac_share:.3f} of the full compute",
                stacklevel=3,
            )
            return cheapest
        best = fitting[0]
        for point in fitting[1:]:
            best = point if self.better(point.score, best.score) else best
        return best

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

    def disagreement_point_for(self, limit: float) -> DisagreementPoint:
        """Return the cheapest setting that was calibrated for at most this disagreement with the full model."""
        fitting = [one for one in self.disagreements if one.limit <= limit + 1e-12]
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


def threads_in_words(threads: int | None) -> str:
    """Return a number of threads in words."""
    return "all cores" if threads is None else f"{threads} thread{'s' * (threads > 1)}"


def pareto_front(
    points: Sequence[OperatingPoint], full_point: OperatingPoint, higher_is_better: bool
) -> tuple[OperatingPoint, ...]:
    """Return the points that no other beats on both cost and score, cheapest first, the full model's always last."""
    sign = 1.0 if higher_is_better else -1.0
    kept: list[OperatingPoint] = []
    for point in sorted(points, key=lambda p: (p.mac_share, -sign * p.score)):
        if not kept or sign * point.score > sign * kept[-1].score:
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
        first, *others = (OperatingPoint(**point) for point in stored["points"])
        return OperatingPoints(
            stored["metric"],
            stored["higher_is_better"],
            stored["data"],
            (first, *others),
            tuple(RiskGuarantee(**one) for one in stored.get("guarantees", ())),
            tuple(stored.get("warnings", ())),
            tuple(LatencyPoint(**one) for one in stored.get("latencies", ())),
            stored.get("scale", 1.0),
            tuple(DisagreementPoint(**one) for one in stored.get("disagreements", ())),
            stored.get("engine"),
            stored.get("precision"),
            stored.get("default"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise OfframpError(
            "operating points", f"a damaged points.json in {folder}", "calibrate or train again"
        ) from error
