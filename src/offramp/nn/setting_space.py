"""How one number from a user becomes a method's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offramp.nn.network import Network


@dataclass(frozen=True)
class Fixed:
    """Nothing to turn."""


@dataclass(frozen=True)
class Threshold:
    """One real number per model, `loosest` meaning the full model."""

    name: str
    loosest: float
    unit: str  # nats, hesitation, normalised, doubt …
    replay: bool = True  # settings never change later states, so one recording tells what each would do
    grid: tuple[float, ...] = ()  # values to try where nothing can be replayed, tightest first, without the loosest
    also: Callable[[Network], list[dict[str, Any]]] | None = None  # settings to try besides the grid, of a network
    each: bool = True  # where settings replay: calibration may also give every off-ramp a threshold of its own


@dataclass(frozen=True)
class Integer:
    """One whole number (patience), `loosest` meaning the full model."""

    name: str
    loosest: int
    replay: bool = True
    grid: tuple[int, ...] = ()  # values to try where nothing can be replayed, tightest first, without the loosest
    most: Callable[[Network], int] | None = None  # the largest value that still changes something, of a network


@dataclass(frozen=True)
class Lengths:
    """A vector over layers, found by search; needs the model to be rerun."""

    name: str


@dataclass(frozen=True)
class Product:
    """Two spaces at once: tokens leave by the first, rows by the second."""

    length: Space
    depth: Space


Space = Fixed | Threshold | Integer | Lengths | Product
