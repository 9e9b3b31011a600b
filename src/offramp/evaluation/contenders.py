"""Who is measured: our model on each engine at each budget, and the peers; whoever cannot start is told, not fatal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from offramp import engines
from offramp.core.policy import Policy
from offramp.engines import Precision
from offramp.errors import OfframpError
from offramp.evaluation import peers
from offramp.evaluation.peers import Batch, Ground, Logits, Variant
from offramp.inference.batching import run_encoded
from offramp.inference.operating_points import parse_latency
from offramp.inference.predictor import Predictor
from offramp.nn.setting_space import FixedSpace

FULL = "1.0"


@dataclass(frozen=True)
class Everything:
    """Instead of settings: every token through every layer, where a method's loosest setting already saves."""

    label: ClassVar[str] = "every layer"


class Said(NamedTuple):
    """What somebody answered to a batch; what it spent and where rows left, if it is ours."""

    logits: Logits
    macs: NDArray[np.float64] | None = None
    exits: NDArray[np.float64] | None = None


Answer = Callable[[Batch], Said]


@dataclass(frozen=True)
class Contender:
    """Somebody to measure. Pickles, so that another process can open the same."""

    engine: str
    precision: str
    peer: str | None = None  # a file of study/peers; None: ours
    settings: Any = None  # ours: the method's settings

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}"


@dataclass(frozen=True)
class Failed:
    """Somebody who could not be measured, and why."""

    engine: str
    precision: str
    reason: str


@dataclass
class Field:
    """The contenders that can be opened, each once; what a user asked for under which names."""

    ground: Ground
    labels: list[tuple[str, Any]]  # budgets as they were written, and the settings they buy
    failed: list[Failed] = field(default_factory=list)
    opened: dict[Contender, Answer] = field(default_factory=dict)
    _ours: dict[Variant, Predictor] = field(default_factory=dict)

    def enter(self, contender: Contender) -> None:
        """Open a contender and let it answer nothing yet; note why if it cannot."""
        try:
            self.opened[contender] = self._open(contender)
        except Exception as error:  # foreign runtimes raise what they like
            self.drop(contender, error)

    def drop(self, contender: Contender, error: Exception) -> None:
        """Leave a contender out from now on."""
        self.opened.pop(contender, None)
        told = Failed(contender.engine, contender.precision, reason(error))
        if told not in self.failed:
            self.failed.append(told)

    def _open(self, contender: Contender) -> Answer:
        if contender.peer is not None:
            return peer(self.ground, contender)
        variant = Variant(contender.engine, contender.precision)
        if variant not in self._ours:
            self._ours[variant] = predictor(self.ground, variant)
        return ours(self._ours[variant], contender.settings)


def reason(error: Exception) -> str:
    """Why somebody is not in the table, in a line."""
    if isinstance(error, OfframpError):
        return f"{error.given}; {error.fix}"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def predictor(ground: Ground, variant: Variant) -> Predictor:
    """Our model on an engine."""
    return Predictor.load(ground.run, variant.engine, cast(Precision, variant.precision), ground.threads)


def ours(model: Predictor, settings: Any) -> Answer:
    """Our model at one setting, by the same path that `predict` takes."""

    def answer(batch: Batch) -> Said:
        if isinstance(settings, Everything):
            made = run_encoded(model.network, model.engine, Policy(), batch, len(batch))
        else:
            made = model.run(batch, settings, len(batch))
        return Said(made.logits, made.macs, made.exit_layer)

    return answer


def peer(ground: Ground, contender: Contender) -> Answer:
    """A static runtime."""
    run = peers.get(contender.peer or "").load(ground, Variant(contender.engine, contender.precision))
    return lambda batch: Said(run(batch))


def open_alone(ground: Ground, contender: Contender) -> Answer:
    """A contender in a process that has no other."""
    if contender.peer is not None:
        return peer(ground, contender)
    return ours(predictor(ground, Variant(contender.engine, contender.precision)), contender.settings)


def dearest(model: Predictor) -> Any:
    """What savings are held against: the loosest setting, or everything where that is cheaper already."""
    method = model.model.method
    return method.settings() if method.hf_equal or isinstance(method.space, FixedSpace) else Everything()


def buy(model: Predictor, budget: str) -> Any:
    """Settings for a budget as it is written: a share, `default`, `max-loss=0.01`, `risk=0.01`, `latency=5ms`."""
    kind, _, value = budget.partition("=")
    try:
        if budget == "default":
            return model.settings()
        if kind == "latency":
            return model.settings(latency=parse_latency(value))
        if kind == "max-loss":
            return model.settings(max_loss=float(value))
        if kind == "risk":
            return model.settings(risk=float(value))
        return model.settings(float(budget))
    except ValueError as error:
        fix = "write shares like 0.5, default, max-loss=0.01, risk=0.01 or latency=5ms"
        raise OfframpError("budgets", repr(budget), fix) from error


def line_up(field: Field, on: Sequence[str], against: Sequence[str], precisions: Sequence[str]) -> list[Contender]:
    """Everybody asked for, ours first; each setting once, however many budgets buy it."""
    distinct = list(dict.fromkeys(settings for _, settings in field.labels))
    known(on, [engines.AUTO, *engines.names()], "engines of ours")
    known(against, rivals(), "somebody to measure against")
    named = [*on, *(name for name in against if name not in peers.names())]
    own = list(dict.fromkeys(engines.choose(name, torch.device("cpu")) for name in named))
    entered = [Contender(name, p, None, s) for name in own for p in precisions for s in distinct]
    for name in against:
        if name in peers.names():
            entered += [Contender(*v, name) for v in peers.get(name).variants if v.precision in precisions]
    return entered


def known(given: Sequence[str], names: Sequence[str], what: str) -> None:
    """Refuse names that there are not."""
    for name in given:
        if name not in names:
            raise OfframpError(what, repr(name), f"use some of: {', '.join(names)}")


def rivals() -> list[str]:
    """Whom `--against` knows: the peers, and our own engines that no peer shares a name with."""
    return [*peers.names(), *(name for name in engines.names() if name not in peers.names())]
