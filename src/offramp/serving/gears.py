"""Gears: the settings in which rows may run, each with its policy and its settings as columns of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, TypeAlias

from torch import Tensor

from offramp.core.policy import NOTHING, Needs, Policy, PolicyWrapper
from offramp.core.rules import ExitRule
from offramp.errors import OfframpError
from offramp.inference.budget import Budget
from offramp.inference.operating_points import DisagreementPoint, LatencyPoint, OperatingPoint, RiskGuarantee
from offramp.inference.predictor import Predictor

ROW_SETTINGS = {"threshold", "thresholds", "temperatures", "patience"}  # settings that may be columns of rows
MOST_KEPT = 2000  # budgets and mixtures of gears that are remembered
MOST_GEARS = 8  # of a governor: enough to be smooth, few enough to return in seconds
Calibrated: TypeAlias = OperatingPoint | RiskGuarantee | DisagreementPoint | LatencyPoint


@dataclass(frozen=True, eq=False)
class Gear:
    """One setting of a run, ready to be used."""

    key: str  # equal for equal settings
    lane: str  # rows of one lane may share a batch
    settings: Any
    policy: Policy
    columns: Mapping[str, Tensor]  # the settings as columns of one row; empty if rows cannot bring their own
    mac_share: float | None = None  # of the full model's MACs, as calibrated
    loss: float | None = None  # of the metric, as calibrated
    mean_exit_layer: float | None = None

    @property
    def share(self) -> float:
        """What this setting costs, as a share of the full compute; all of it where nothing was calibrated."""
        return 1.0 if self.mac_share is None else self.mac_share

    def describe(self) -> dict[str, Any]:
        """Return the fields by which an answer names the gear it was computed in."""
        return {"mac_share": self.mac_share, "expected_loss": self.loss}


class OpenExits(PolicyWrapper):
    """A policy that reads settings from rows and consults only the exits at which one of the gears may leave."""

    def __init__(self, inner: Policy, layers: frozenset[int]) -> None:
        self.inner, self.layers = inner, layers

    def needs(self, layer: int) -> Needs:
        """Return the needs of the inner policy at open exits, and elsewhere those that are no exit."""
        needs = self.inner.needs(layer)
        if layer in self.layers:
            return needs
        return NOTHING.union(needs._replace(should_exit=False, logits=False))

    def rule(self) -> ExitRule | None:
        """Return the rule over all exits: at a closed one the thresholds of the rows are 0."""
        return self.inner.rule()


class GearBox:
    """All gears of a run: one for each distinct setting that requests or the governor have used."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.depth = predictor.network.depth
        self._gears: dict[str, Gear] = {}
        self._mixed: dict[frozenset[str], Policy] = {}
        self._by_budget: dict[Budget, Gear] = {}
        self.full = self.gear(self._full_settings())

    def _full_settings(self) -> Any:
        points = self.predictor.points
        return self.predictor.model.method.settings() if points is None else self._configured(points.full_point)

    def gear(self, settings: Any, point: OperatingPoint | None = None) -> Gear:
        """Return the gear of settings; `point` is the operating point they belong to, if they belong to one.

        Settings of a proven risk, a disagreement or a latency need not be those of a point; their share is known, too.
        """
        key = repr(settings)
        if key not in self._gears:
            points, model = self.predictor.points, self.predictor.model
            calibrated = point or self._calibrated(key)
            if isinstance(calibrated, OperatingPoint):
                point = calibrated
            policy = model.method.policy(self.predictor.network, settings)
            columns = policy.row_settings() if self.predictor.network.decoder is None else {}
            self._gears[key] = Gear(
                key,
                _lane(settings, policy) if columns else key,
                settings,
                policy,
                columns,
                calibrated.mac_share if calibrated else None,
                points.loss_of(point) if point and points else None,
                point.mean_exit_layer if point else None,
            )
        return self._gears[key]

    def for_budget(self, budget: Budget) -> Gear:
        """Return the gear that a budget chooses; refuses what the run was not calibrated for."""
        gear = self._by_budget.get(budget)
        if gear is None:
            if len(self._by_budget) >= MOST_KEPT:  # clients may send any number
                self._by_budget.clear()
            gear = self._by_budget[budget] = self.gear(self._settings_for(budget))
        return gear

    def _settings_for(self, budget: Budget) -> Any:
        points = self.predictor.points
        if budget.kind == "share" and points is not None and budget.value < points.points[0].mac_share:
            return self._configured(points.points[0])  # the cheapest, without the warning that Python keeps for ever
        return self.predictor.settings_for(budget)

    def cheapest_above(self, share: float) -> Gear:
        """Return the gear of the cheapest operating point that costs more than a share; the full one if none does."""
        points = self.predictor.points
        costlier = (one for one in points.points if one.mac_share > share) if points is not None else iter(())
        point = next(costlier, None)
        return self.full if point is None else self.gear(self._configured(point), point)

    def _calibrated(self, key: str) -> Calibrated | None:
        """Return what settings were calibrated as; an operating point, if they are one."""
        points = self.predictor.points
        if points is None:
            return None
        listed: list[Calibrated] = [*points.points, *points.guarantees, *points.disagreements, *points.latencies]
        return next((one for one in listed if repr(self._configured(one)) == key), None)

    def _configured(self, point: Calibrated) -> Any:
        return (
            self.predictor.settings(given=point.settings) if point.settings else self.predictor.model.method.settings()
        )

    def ladder(self, normal: Gear, min_budget: float | None = None, max_loss: float | None = None) -> list[Gear]:
        """Return the gears of a governor, cheapest first: the run's points within bounds, the normal gear, the full.

        Without a bound no point is cheaper than the normal gear. At most `MOST_GEARS` are kept, spread evenly.
        """
        points = self.predictor.points
        bounded = min_budget is not None or max_loss is not None
        share = normal.mac_share if normal.mac_share is not None else 1.0
        chosen: list[Gear] = []
        for point in points.points if points is not None else ():
            loss = points.loss_of(point) if points is not None else 0.0
            within = (min_budget is None or point.mac_share >= min_budget) and (max_loss is None or loss <= max_loss)
            if point.mac_share > share or (bounded and within):
                chosen.append(self.gear(self._configured(point), point))
        below = [gear for gear in chosen if gear.mac_share is not None and gear.mac_share < share]
        above = [gear for gear in chosen if gear not in below and gear is not normal and gear is not self.full]
        ladder = [*_spread(below, MOST_GEARS - 2), normal, *_spread(above, 2)]
        return ladder if normal is self.full else [*ladder, self.full]

    def mixed_policy(self, gears: frozenset[Gear]) -> Policy:
        """Return a policy for a batch whose rows run in these gears."""
        if len(gears) == 1:
            return next(iter(gears)).policy
        key = frozenset(gear.key for gear in gears)
        if key not in self._mixed:
            if len(self._mixed) >= MOST_KEPT:
                self._mixed.clear()
            layers = range(self.depth + 1)
            open_exits = {n for gear in gears for n in layers if gear.policy.needs(n).should_exit}
            policy = self._mixed[key] = OpenExits(next(iter(gears)).policy.by_row(), frozenset(open_exits))
            return policy
        return self._mixed[key]


def _spread(gears: list[Gear], count: int) -> list[Gear]:
    """Return at most `count` gears, the first and the last among them."""
    if len(gears) <= count:
        return gears
    return [gears[round(place * (len(gears) - 1) / (count - 1))] for place in range(count)]


def _lane(settings: Any, policy: Policy) -> str:
    """Return a name that is equal for policies whose rows may share a batch."""
    if not is_dataclass(settings):
        raise OfframpError("settings of a method", repr(settings), "a method's settings are a dataclass")
    shared = {name: value for name, value in asdict(settings).items() if name not in ROW_SETTINGS}  # type: ignore[arg-type]  # a dataclass
    return f"{type(policy).__name__} {shared}"
