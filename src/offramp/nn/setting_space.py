"""How one number from a user becomes a method's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offramp.nn.network import Network


@dataclass(frozen=True)
class FixedSpace:
    """Nothing to turn."""


@dataclass(frozen=True)
class ThresholdSpace:
    """One real number per model, `loosest` meaning the full model."""

    name: str
    full_value: float
    unit: str  # nats, hesitation, normalised, doubt …
    replay: bool = True  # settings never change later states, so one recording tells what each would do
    grid: tuple[float, ...] = ()  # values to try where nothing can be replayed, tightest first, without the loosest
    extra_settings: Callable[[Network], list[dict[str, Any]]] | None = (
        None  # settings to try besides the grid, of a network
    )
    per_exit: bool = True  # where settings replay: calibration may also give every off-ramp a threshold of its own


@dataclass(frozen=True)
class IntegerSpace:
    """One whole number (patience), `loosest` meaning the full model."""

    name: str
    full_value: int
    replay: bool = True
    grid: tuple[int, ...] = ()  # values to try where nothing can be replayed, tightest first, without the loosest
    largest: Callable[[Network], int] | None = None  # the largest value that still changes something, of a network


@dataclass(frozen=True)
class LengthSpace:
    """A vector over layers, found by search; needs the model to be rerun."""

    name: str


@dataclass(frozen=True)
class ProductSpace:
    """Two spaces at once: tokens leave by the first, rows by the second."""

    length: Space
    depth: Space


Space = FixedSpace | ThresholdSpace | IntegerSpace | LengthSpace | ProductSpace
