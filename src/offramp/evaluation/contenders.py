"""What a bench measures: Offramp on each engine at each budget, and the peers.

A contender that cannot be opened or run is recorded with the reason; the others are measured all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from offramp import engines
from offramp.backbones import Encoder
from offramp.core.policy import Policy
from offramp.engines import EngineOptions, Precision
from offramp.errors import OfframpError
from offramp.evaluation import peers
from offramp.evaluation.peers import BenchModel, EncodedBatch, EngineVariant, Logits
from offramp.inference.batching import run_encoded
from offramp.inference.budget import Budget
from offramp.inference.predictor import Predictor
from offramp.nn.outputs import RunOutput
from offramp.nn.setting_space import FixedSpace

FULL = "1.0"


@dataclass(frozen=True)
class EveryLayer:
    """Stands for settings: every token goes through every layer, if even a method's full settings save compute."""

    label: ClassVar[str] = "every layer"


class ContenderOutput(NamedTuple):
    """The logits of a batch; for Offramp also its output, whose costs are computed when read."""

    logits: Logits
    output: RunOutput | None = None

    @property
    def macs(self) -> NDArray[np.float64] | None:
        """MACs of each row; None for peers."""
        return None if self.output is None else self.output.macs

    @property
    def exits(self) -> NDArray[np.float64] | None:
        """Exit layer of each row; None for peers."""
        return None if self.output is None else self.output.exit_layer


Runner = Callable[[EncodedBatch], ContenderOutput]


@dataclass(frozen=True)
class Contender:
    """One thing to measure. It pickles, so that another process can open the same contender."""

    engine: str
    precision: str
    peer: str | None = None  # the name of a peer; None: Offramp
    settings: Any = None  # of Offramp: the method's settings

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}"


@dataclass(frozen=True)
class FailedContender:
    """A contender that could not be measured, and the reason."""

    engine: str
    precision: str
    reason: str


@dataclass
class Contenders:
    """The open contenders, those that failed, and the settings of every budget."""

    model: BenchModel
    labels: list[tuple[str, Any]]  # budgets as they were written, and their settings
    failed: list[FailedContender] = field(default_factory=list)
    opened: dict[Contender, Runner] = field(default_factory=dict)
    predictors: dict[EngineVariant, Predictor] = field(default_factory=dict)  # each is loaded once

    def open(self, contender: Contender) -> None:
        """Open a contender, or record why it cannot be opened."""
        try:
            self.opened[contender] = self._runner(contender)
        except Exception as error:  # other runtimes raise errors of any class
            self.drop(contender, error)

    def drop(self, contender: Contender, error: Exception) -> None:
        """Leave a contender out from now on, and record the reason."""
        self.opened.pop(contender, None)
        failed = FailedContender(contender.engine, contender.precision, failure_reason(error))
        if failed not in self.failed:
            self.failed.append(failed)

    def _runner(self, contender: Contender) -> Runner:
        if contender.peer is not None:
            return peer_runner(self.model, contender)
        variant = EngineVariant(contender.engine, contender.precision)
        if variant not in self.predictors:
            self.predictors[variant] = load_predictor(self.model, variant)
        return predictor_runner(self.predictors[variant], contender.settings)


def failure_reason(error: Exception) -> str:
    """Return in one line why a contender is missing."""
    if isinstance(error, OfframpError):
        return f"{error.given}; {error.fix}"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def load_predictor(model: BenchModel, variant: EngineVariant) -> Predictor:
    """Load the run on one of Offramp's engines."""
    return Predictor.load(model.run, variant.engine, cast(Precision, variant.precision), model.threads)


def predictor_runner(model: Predictor, settings: Any) -> Runner:
    """Return a function that runs a batch at one setting, by the same path as `predict`."""

    def run(batch: EncodedBatch) -> ContenderOutput:
        if isinstance(settings, EveryLayer):
            output = run_encoded(model.network, model.engine, Policy(), batch, len(batch))
        else:
            output = model.run(batch, settings, len(batch))
        return ContenderOutput(output.logits, output)

    return run


def peer_runner(model: BenchModel, contender: Contender) -> Runner:
    """Return a function that runs a batch on a static runtime."""
    run = peers.get(contender.peer or "").load(model, EngineVariant(contender.engine, contender.precision))
    return lambda batch: ContenderOutput(run(batch))


def open_contender(model: BenchModel, contender: Contender) -> Runner:
    """Open one contender in a process of its own."""
    if contender.peer is not None:
        return peer_runner(model, contender)
    variant = EngineVariant(contender.engine, contender.precision)
    return predictor_runner(load_predictor(model, variant), contender.settings)


def full_settings(model: Predictor) -> Any:
    """Return what savings are compared with: the method's full settings, or every layer if those already save."""
    method = model.model.method
    return method.settings() if method.hf_equal or isinstance(method.space, FixedSpace) else EveryLayer()


def settings_for_budget(model: Predictor, budget: str) -> Any:
    """Return the settings for a budget as text: a share, `default`, `max-loss=0.01`, `risk=0.01`, `latency=5ms`."""
    return model.settings(Budget.from_text(budget))


def list_contenders(
    contenders: Contenders, encoder: Encoder, names: Sequence[str], against: Sequence[str], precisions: Sequence[str]
) -> list[Contender]:
    """Return all contenders, Offramp's engines first; a setting is listed once, even if several budgets give it."""
    distinct = list(dict.fromkeys(settings for _, settings in contenders.labels))
    check_names(names, [engines.AUTO, *engines.names()], "engines of Offramp")
    check_names(against, comparable_names(), "a runtime to measure against")
    named = [*names, *(name for name in against if name not in peers.names())]
    own = dict.fromkeys((_chosen(name, encoder, p), p) for name in named for p in precisions)
    listed = [Contender(name, p, None, s) for name, p in own for s in distinct]
    for name in against:
        if name in peers.names():
            listed += [Contender(*v, name) for v in peers.get(name).variants if v.precision in precisions]
    return listed


def _chosen(name: str, encoder: Encoder, precision: str) -> str:
    """Return the engine that a name means for a model in a precision."""
    return engines.choose(name, torch.device("cpu"), encoder, EngineOptions(cast(Precision, precision)))


def check_names(given: Sequence[str], names: Sequence[str], what: str) -> None:
    """Refuse an unknown name."""
    for name in given:
        if name not in names:
            raise OfframpError(what, repr(name), f"use some of: {', '.join(names)}")


def comparable_names() -> list[str]:
    """Return what `--against` accepts: the peers, and Offramp's engines whose name is not a peer's."""
    return [*peers.names(), *(name for name in engines.names() if name not in peers.names())]
