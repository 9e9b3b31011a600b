"""Which settings of a method calibration may choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offramp.nn.network import Network


@dataclass(frozen=True)
class FixedSpace:
    """No setting can be chosen."""


@dataclass(frozen=True)
class ThresholdSpace:
    """One real number; `full_value` is the setting of the full model."""

    name: str
    full_value: float
    unit: str  # nats, normalised entropy, … shown to users
    replay: bool = True  # settings never change later states, so one recording is enough to replay all
    grid: tuple[float, ...] = ()  # values to try where nothing can be replayed, cheapest first, without `full_value`
    # settings of a network to try besides the grid
    extra_settings: Callable[[Network], list[dict[str, Any]]] | None = None
    per_exit: bool = True  # where settings replay: calibration may also choose a threshold for every exit
    per_layer: str = ""  # where they do not: the setting with a number for every layer, which calibration searches


@dataclass(frozen=True)
class IntegerSpace:
    """One integer (patience); `full_value` is the setting of the full model."""

    name: str
    full_value: int
    replay: bool = True
    grid: tuple[int, ...] = ()  # values to try where nothing can be replayed, cheapest first, without `full_value`
    largest: Callable[[Network], int] | None = None  # the largest value that has an effect on a network


@dataclass(frozen=True)
class LengthSpace:
    """A vector over layers, found by search, for which the model is rerun; `nn/lengths.py` has what the search needs
    to know of a network."""

    name: str


@dataclass(frozen=True)
class ProductSpace:
    """Two spaces at once: the first decides which tokens are dropped, the second when rows exit."""

    length: Space
    depth: Space


Space = FixedSpace | ThresholdSpace | IntegerSpace | LengthSpace | ProductSpace
