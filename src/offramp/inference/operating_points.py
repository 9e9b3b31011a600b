"""Operating points: from a budget to settings.

`budget=b` is the most accurate point whose expected share of the full model's MACs is at most b, else the cheapest;
`budget=1.0` is the loosest setting; no budget is the cheapest point within 0.5 points of the loosest on dev rows.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offramp.errors import OfframpError
from offramp.utils.files import read_json, write_json

TOLERANCE = 0.005
BLOCK, BLOCKS = 4096, 256  # bytes looked at, and at how many places, to tell one file of weights from another


@dataclass(frozen=True)
class OperatingPoint:
    """One setting and what it did on the calibration rows."""

    settings: dict[str, Any]
    mac_share: float
    score: float  # the task's metric, as expected on new rows
    mean_exit_layer: float
    seen: float | None = None  # what it was on the calibration rows themselves
    error: float = 0.0  # about a standard error of what it loses, from how often it departs from the full model


@dataclass(frozen=True)
class RiskGuarantee:
    """Settings and what was proven about them: with `confidence`, at most `risk` departure from the full model."""

    risk: float
    confidence: float
    settings: dict[str, Any]
    rows: int  # that it was tested on
    found: float  # the mean loss on those rows
    mac_share: float


@dataclass(frozen=True)
class LatencyPoint:
    """Settings that answer a single row, from text to prediction, within so many milliseconds on one machine."""

    milliseconds: float  # what was asked
    percentile: float  # of rows that must keep within it
    settings: dict[str, Any]
    predicted: float  # milliseconds at that percentile, from measured prices
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
    """All useful settings of a model, cheapest first; the last is the loosest."""

    metric: str
    higher_is_better: bool
    data: dict[str, Any]  # name, rows, fingerprint
    points: tuple[OperatingPoint, ...]
    guarantees: tuple[RiskGuarantee, ...] = ()
    warnings: tuple[str, ...] = ()  # what calibration noticed
    latencies: tuple[LatencyPoint, ...] = ()
    scale: float = 1.0  # the best value of the metric: what may be lost is counted in shares of it

    def better(self, a: float, b: float) -> bool:
        """Whether score `a` beats score `b`."""
        return a > b if self.higher_is_better else a < b

    @property
    def full_point(self) -> OperatingPoint:
        """The full model's own point."""
        return self.points[-1]

    def proven(self, risk: float) -> RiskGuarantee:
        """The cheapest setting that was shown to keep within a risk."""
        fitting = [g for g in self.guarantees if g.risk <= risk]
        if not fitting:
            known = ", ".join(f"{g.risk:g}" for g in self.guarantees) or "none"
            raise OfframpError(
                f"settings with a guaranteed risk of {risk:g}",
                f"a model calibrated for these risks: {known}",
                f"run `offramp calibrate RUN --data FILE --risk {risk:g} --confidence 0.95` first",
            )
        return min(fitting, key=lambda g: g.mac_share)

    def within(self, seconds: float, engine: str, precision: str) -> LatencyPoint:
        """The best setting that was shown to answer in time on this engine."""
        here, ms = (engine, precision), 1000 * seconds
        fitting = [one for one in self.latencies if one.milliseconds <= ms + 1e-9 and one.how == here]
        if not fitting:
            known = ", ".join(f"{one.milliseconds:g}ms on {' '.join(one.how)}" for one in self.latencies) or "none"
            options = f"--latency {ms:g}ms --engine {engine} --precision {precision}"
            raise OfframpError(
                f"answers within {ms:g}ms on {engine} {precision}",
                f"a model calibrated for these latencies: {known}",
                f"run `offramp calibrate RUN --data FILE {options}` here first",
            )
        return max(fitting, key=lambda one: one.milliseconds)

    def choose(self, budget: float | None, max_loss: float = TOLERANCE) -> OperatingPoint:
        """The point for a budget; without one the cheapest that loses at most `max_loss`."""
        if not max_loss >= 0.0:
            raise OfframpError("what the metric may lose", f"max_loss={max_loss}", "give 0 or more, e.g. 0.01")
        if budget is None:
            return next((p for p in self.points if self.lost(p) <= max_loss + 1e-9), self.full_point)
        check_budget(budget)
        if budget >= 1.0:
            return self.full_point
        fitting = [p for p in self.points if p.mac_share <= budget]
        if not fitting:
            cheapest = self.points[0]
            warnings.warn(
                f"no point within budget {budget}: using the cheapest, {cheapest.mac_share:.3f} of the full compute",
                stacklevel=2,
            )
            return cheapest
        best = fitting[0]
        for point in fitting[1:]:
            best = point if self.better(point.score, best.score) else best
        return best

    def lost(self, point: OperatingPoint) -> float:
        """What a point loses of the full model's score, as a share of the best value there is; of a loss (lower is
        better) the part it grows by."""
        lost = (self.full_point.score - point.score) / self.scale
        return lost if self.higher_is_better else -lost / max(abs(self.full_point.score), 1e-9)


def check_budget(budget: Any) -> None:
    """A budget is a share of the full model's compute."""
    if isinstance(budget, str) or not 0.0 < budget <= 1.0:
        raise OfframpError(
            "a budget, the share of the full model's compute",
            f"budget={budget!r}",
            "give a number above 0 and at most 1, e.g. 0.5",
        )


def parse_latency(text: str) -> float:
    """`5ms`, `0.2s` or `800us` in seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|µs|ms|s)\s*", text)
    if match is None or not float(match[1]) > 0.0:
        fix = "give a number above 0 with its unit: 5ms, 0.2s or 800us"
        raise OfframpError("a time for one answer", repr(text), fix)
    return float(match[1]) * {"s": 1.0, "ms": 1e-3}.get(match[2], 1e-6)


def threads_in_words(threads: int | None) -> str:
    """A number of threads in words."""
    return "all cores" if threads is None else f"{threads} thread{'s' * (threads > 1)}"


def pareto_front(
    points: Sequence[OperatingPoint], loosest: OperatingPoint, higher_is_better: bool
) -> tuple[OperatingPoint, ...]:
    """The points that no other beats on both cost and score, cheapest first, the loosest always last."""
    sign = 1.0 if higher_is_better else -1.0
    kept: list[OperatingPoint] = []
    for point in sorted(points, key=lambda p: (p.mac_share, -sign * p.score)):
        if not kept or sign * point.score > sign * kept[-1].score:
            kept.append(point)
    # a point dearer than the full model (heads that never fire) is of no use to anybody
    return (*[p for p in kept if p.mac_share < loosest.mac_share], loosest)


def weights_fingerprint(folder: Path) -> str:
    """A fingerprint of a folder's weights: sizes, headers and blocks spread over every file, so that it costs
    milliseconds and still no two trainings share it."""
    known = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        known.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in dict.fromkeys(size * block // BLOCKS for block in range(BLOCKS)):
                file.seek(place)
                known.update(file.read(BLOCK))
    return known.hexdigest()[:16]


def save_points(folder: Path, points: OperatingPoints) -> None:
    """Write points.json beside the weights it belongs to."""
    write_json(folder / "points.json", {**asdict(points), "model": weights_fingerprint(folder)})


def load_points(folder: Path) -> OperatingPoints:
    """Read points.json, which must belong to the weights beside it."""
    raw = read_json(folder / "points.json")
    owner = raw.get("model") if isinstance(raw, dict) else None
    if owner is not None and owner != weights_fingerprint(folder):
        raise OfframpError(
            f"the operating points of {folder}",
            "a points.json that was calibrated for another model: its settings mean nothing to these weights",
            f"run `offramp calibrate {folder} --data FILE`, or put back the points.json of this model",
        )
    try:
        first, *others = (OperatingPoint(**point) for point in raw["points"])
        proven = tuple(RiskGuarantee(**one) for one in raw.get("guarantees", ()))
        noticed = tuple(raw.get("warnings", ()))
        timed = tuple(LatencyPoint(**one) for one in raw.get("latencies", ()))
        known = (raw["metric"], raw["higher_is_better"], raw["data"])
        return OperatingPoints(*known, (first, *others), proven, noticed, timed, raw.get("scale", 1.0))
    except (KeyError, TypeError, ValueError) as error:
        raise OfframpError(
            "operating points", f"a damaged points.json in {folder}", "calibrate or train again"
        ) from error
