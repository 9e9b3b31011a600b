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
from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits
from offramp.inference.batching import run_encoded
from offramp.inference.budget import Budget
from offramp.inference.predictor import Predictor
from offramp.nn.setting_space import FixedSpace

FULL = "1.0"


@dataclass(frozen=True)
class EveryLayer:
    """Instead of settings: every token through every layer, where a method's loosest setting already saves."""

    label: ClassVar[str] = "every layer"


class ContenderOutput(NamedTuple):
    """What somebody answered to a batch; what it spent and where rows left, if it is ours."""

    logits: Logits
    macs: NDArray[np.float64] | None = None
    exits: NDArray[np.float64] | None = None


Runner = Callable[[EncodedBatch], ContenderOutput]


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
class FailedContender:
    """Somebody who could not be measured, and why."""

    engine: str
    precision: str
    reason: str


@dataclass
class Contenders:
    """The contenders that can be opened, each once; what a user asked for under which names."""

    ground: BenchModel
    labels: list[tuple[str, Any]]  # budgets as they were written, and the settings they buy
    failed: list[FailedContender] = field(default_factory=list)
    opened: dict[Contender, Runner] = field(default_factory=dict)
    _ours: dict[EngineVariant, Predictor] = field(default_factory=dict)

    def enter(self, contender: Contender) -> None:
        """Open a contender and let it answer nothing yet; note why if it cannot."""
        try:
            self.opened[contender] = self._open(contender)
        except Exception as error:  # foreign runtimes raise what they like
            self.drop(contender, error)

    def drop(self, contender: Contender, error: Exception) -> None:
        """Leave a contender out from now on."""
        self.opened.pop(contender, None)
        told = FailedContender(contender.engine, contender.precision, failure_reason(error))
        if told not in self.failed:
            self.failed.append(told)

    def _open(self, contender: Contender) -> Runner:
        if contender.peer is not None:
            return peer_runner(self.ground, contender)
        variant = EngineVariant(contender.engine, contender.precision)
        if variant not in self._ours:
            self._ours[variant] = load_predictor(self.ground, variant)
        return predictor_runner(self._ours[variant], contender.settings)


def failure_reason(error: Exception) -> str:
    """Why somebody is not in the table, in a line."""
    if isinstance(error, OfframpError):
        return f"{error.given}; {error.fix}"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def load_predictor(ground: BenchModel, variant: EngineVariant) -> Predictor:
    """Our model on an engine."""
    return Predictor.load(ground.run, variant.engine, cast(Precision, variant.precision), ground.threads)


def predictor_runner(model: Predictor, settings: Any) -> Runner:
    """Our model at one setting, by the same path that `predict` takes."""

    def answer(batch: EncodedBatch) -> ContenderOutput:
        if isinstance(settings, EveryLayer):
            made = run_encoded(model.network, model.engine, Policy(), batch, len(batch))
        else:
            made = model.run(batch, settings, len(batch))
        return ContenderOutput(made.logits, made.macs, made.exit_layer)

    return answer


def peer_runner(ground: BenchModel, contender: Contender) -> Runner:
    """A static runtime."""
    run = peers.get(contender.peer or "").load(ground, EngineVariant(contender.engine, contender.precision))
    return lambda batch: ContenderOutput(run(batch))


def open_contender(ground: BenchModel, contender: Contender) -> Runner:
    """A contender in a process that has no other."""
    if contender.peer is not None:
        return peer_runner(ground, contender)
    return predictor_runner(
        load_predictor(ground, EngineVariant(contender.engine, contender.precision)), contender.settings
    )


def full_settings(model: Predictor) -> Any:
    """What savings are held against: the loosest setting, or everything where that is cheaper already."""
    method = model.model.method
    return method.settings() if method.hf_equal or isinstance(method.space, FixedSpace) else EveryLayer()


def settings_for_budget(model: Predictor, budget: str) -> Any:
    """Settings for a budget as it is written: a share, `default`, `max-loss=0.01`, `risk=0.01`, `latency=5ms`."""
    return model.settings(Budget.from_text(budget))


def list_contenders(
    field: Contenders, on: Sequence[str], against: Sequence[str], precisions: Sequence[str]
) -> list[Contender]:
    """Everybody asked for, ours first; each setting once, however many budgets buy it."""
    distinct = list(dict.fromkeys(settings for _, settings in field.labels))
    check_names(on, [engines.AUTO, *engines.names()], "engines of ours")
    check_names(against, comparable_names(), "somebody to measure against")
    named = [*on, *(name for name in against if name not in peers.names())]
    own = list(dict.fromkeys(engines.choose(name, torch.device("cpu")) for name in named))
    entered = [Contender(name, p, None, s) for name in own for p in precisions for s in distinct]
    for name in against:
        if name in peers.names():
            entered += [Contender(*v, name) for v in peers.get(name).variants if v.precision in precisions]
    return entered


def check_names(given: Sequence[str], names: Sequence[str], what: str) -> None:
    """Refuse names that there are not."""
    for name in given:
        if name not in names:
            raise OfframpError(what, repr(name), f"use some of: {', '.join(names)}")


def comparable_names() -> list[str]:
    """Whom `--against` knows: the peers, and our own engines that no peer shares a name with."""
    return [*peers.names(), *(name for name in engines.names() if name not in peers.names())]
