"""A budget: how much compute, loss, disagreement, risk or time a user allows, as one value.

Whatever form a user gives it in (keyword arguments in Python, options of a command, a text such as `max-loss=0.01`), it
is parsed and checked here, once. Operating points turn a budget into settings.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from offramp.errors import OfframpError

Kind = Literal["default", "share", "loss", "disagreement", "risk", "latency"]
DEFAULT_LOSS = 0.005  # what the metric may lose if nothing else is given
NAMES: dict[Kind, str] = {  # how users write each kind
    "share": "budget",
    "loss": "max_loss",
    "disagreement": "max_disagreement",
    "risk": "risk",
    "latency": "latency",
}


@dataclass(frozen=True)
class Budget:
    """What a prediction may cost or lose. Use the constructors: they check the value."""

    kind: Kind = "default"
    value: float = DEFAULT_LOSS  # of a latency: seconds

    @classmethod
    def default(cls) -> Budget:
        """Allow the cheapest point that loses at most half a point of the metric."""
        return cls()

    @classmethod
    def share(cls, share: float) -> Budget:
        """Allow a share of the full model's compute, above 0 and at most 1; 1 is the full model."""
        what, fix = "a budget, the share of the full model's compute", "give a number above 0 and at most 1, e.g. 0.5"
        return cls("share", _number("share", share, 0.0 < _value(share) <= 1.0, what, fix))

    @classmethod
    def loss(cls, loss: float) -> Budget:
        """Allow the metric to lose this share of its best value against the full model, e.g. 0.01: one point."""
        what, fix = "what the metric may lose", "give 0 to 1: 0.01 is one point"
        return cls("loss", _number("loss", loss, 0.0 <= _value(loss) <= 1.0, what, fix))

    @classmethod
    def disagreement(cls, disagreement: float) -> Budget:
        """Allow this share of predictions to differ from those of the full model."""
        what, fix = "a share of predictions that may differ from the full model's", "give 0 or more, below 1: 0.01"
        return cls("disagreement", _number("disagreement", disagreement, 0.0 <= _value(disagreement) < 1.0, what, fix))

    @classmethod
    def risk(cls, risk: float) -> Budget:
        """Allow a disagreement with the full model that calibration has proven not to be exceeded."""
        what, fix = "a proven risk of disagreement", "give a number above 0 and below 1, e.g. 0.01"
        return cls("risk", _number("risk", risk, 0.0 < _value(risk) < 1.0, what, fix))

    @classmethod
    def latency(cls, latency: str | float) -> Budget:
        """Allow a time for a single answer that calibration has met: `"5ms"`, or seconds as a number."""
        if isinstance(latency, str):
            return cls("latency", parse_latency(latency))
        what, fix = "a time for one answer", 'give a time with its unit, e.g. "5ms", or seconds above 0, e.g. 0.005'
        return cls("latency", _number("latency", latency, 0.0 < _value(latency) < math.inf, what, fix))

    @classmethod
    def parse(
        cls,
        budget: float | Budget | None = None,
        *,
        max_loss: float | None = None,
        max_disagreement: float | None = None,
        risk: float | None = None,
        latency: str | float | None = None,
    ) -> Budget:
        """Return the budget that keyword arguments or command options state: one of them, or none for the default."""
        arguments: dict[Kind, Any] = {
            "share": budget,
            "loss": max_loss,
            "disagreement": max_disagreement,
            "risk": risk,
            "latency": latency,
        }
        given = {kind: value for kind, value in arguments.items() if value is not None}
        if len(given) > 1:
            listed = " and ".join(f"{NAMES[kind]}={value}" for kind, value in given.items())
            raise OfframpError("a budget", listed, "give only one of them")
        if isinstance(budget, Budget):
            return budget
        for kind, value in given.items():
            checked: Budget = getattr(cls, kind)(value)
            return checked
        return cls.default()

    @classmethod
    def from_text(cls, text: str) -> Budget:
        """Return the budget that a text states: `0.5`, `default`, `max-loss=0.01`, `risk=0.01` or `latency=5ms`."""
        name, equals, value = text.strip().partition("=")
        kinds = {written.replace("_", "-"): kind for kind, written in NAMES.items() if kind != "share"}
        if text.strip() == "default":
            return cls.default()
        try:
            if not equals:
                return cls.share(float(text))
            if name == "latency":
                return cls.latency(value)
            return cls.parse(**{NAMES[kinds[name]]: float(value)})
        except (ValueError, KeyError) as error:
            fix = "write shares like 0.5, default, max-loss=0.01, max-disagreement=0.01, risk=0.01 or latency=5ms"
            raise OfframpError("budgets", repr(text), fix) from error

    def __str__(self) -> str:
        if self.kind == "default":
            return "the default budget"
        return f"{NAMES[self.kind]}={f'{1000 * self.value:g}ms' if self.kind == 'latency' else f'{self.value:g}'}"


def parse_latency(text: str) -> float:
    """Return `5ms`, `0.2s` or `800us` in seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|µs|ms|s)\s*", text)
    if match is None or not float(match[1]) > 0.0:
        fix = "give a number above 0 with its unit: 5ms, 0.2s or 800us"
        raise OfframpError("a time for one answer", f"latency={text!r}", fix)
    return float(match[1]) * {"s": 1.0, "ms": 1e-3}.get(match[2], 1e-6)


def _value(value: Any) -> float:
    """Return a number as it is, and NaN, which is in no range, for anything else."""
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.nan


def _number(kind: Kind, value: Any, fits: bool, what: str, fix: str) -> float:
    """Return a value that fits; refuse any other, also one that is not a number."""
    if not fits:
        raise OfframpError(what, f"{NAMES[kind]}={value!r}", fix)
    return float(value)
