"""How one number from a user becomes a method's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Fixed:
    """Nothing to turn."""


@dataclass(frozen=True)
class Threshold:
    """One real number per model, `loosest` meaning the full model. Calibrated by replaying one trace."""

    name: str
    loosest: float
    unit: Literal["nats", "probability", "normalised"]
    sooner: Literal["higher", "lower"]  # which way the threshold moves to leave sooner


@dataclass(frozen=True)
class Integer:
    """One whole number (patience), `loosest` meaning the full model."""

    name: str
    loosest: int
    tightest: int


@dataclass(frozen=True)
class Lengths:
    """A vector over layers, found by search; needs the model to be rerun."""

    name: str


Space = Fixed | Threshold | Integer | Lengths
