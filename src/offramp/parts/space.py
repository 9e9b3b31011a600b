"""How one number from a user becomes a method's settings."""

from __future__ import annotations

from dataclasses import dataclass


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
    each: bool = True  # where settings replay: calibration may also give every off-ramp a threshold of its own


@dataclass(frozen=True)
class Integer:
    """One whole number (patience), `loosest` meaning the full model."""

    name: str
    loosest: int
    replay: bool = True
    grid: tuple[int, ...] = ()  # values to try where nothing can be replayed, tightest first, without the loosest


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
