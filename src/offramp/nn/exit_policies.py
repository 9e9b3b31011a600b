"""What exit methods share: options, settings, exit heads, and the policy "exit where uncertainty is small".

Uncertainty is what a method measures of a row's logits (entropy, least confidence, a learned unit); it is 0 when
certain. One threshold serves all exits, or calibration chooses one for each, together with a temperature for its
logits. An exit whose threshold is 0 is closed: no row can exit there, so its head is not evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from offramp.core.columns import TEMPERATURES, THRESHOLDS
from offramp.core.cost import HeadCost
from offramp.core.engine import MeasuringExitHeads
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Needs, Policy
from offramp.core.rules import ExitRule, Measure
from offramp.errors import OfframpError
from offramp.nn.bag_of_words import BagOfWordsExit, FittedBagOfWordsExit
from offramp.nn.confidence import row_entropy, row_least_confidence, row_normalised_entropy
from offramp.nn.exit_heads import ExitHead, Pool, SharedExitHead
from offramp.nn.keys import EXIT_HEADS
from offramp.nn.network import Network
from offramp.utils.merged_dataclass import SINGLE_METHOD_ONLY

BagOfWordsTraining = Literal["learned", "fitted"]


@dataclass(frozen=True)
class ExitOptions:
    """How exit heads are built and trained; fixed once trained."""

    pool: Pool = "meanmax"
    exit0: bool = True  # an exit on the embeddings, before any layer
    exits: tuple[int, ...] = ()  # layers with an exit head, 0: the embeddings; empty: every layer below the last
    # the first exits of row classifiers read words and pairs of neighbours (two look-up tables)
    bag_of_words: bool = True
    # tables are learned with the exit heads, or solved for before training (better for long rows)
    bag_of_words_training: BagOfWordsTraining = "learned"
    bag_of_words_depth: int = 0  # the last layer whose exit reads words, each with its own tables
    head_lr: float = 2e-3  # new heads learn faster than the pretrained backbone

    def __post_init__(self) -> None:
        if not 0.0 < self.head_lr < 1.0:
            raise OfframpError("a learning rate of heads", f"head_lr={self.head_lr}", "use e.g. 0.002")
        if self.bag_of_words_depth < 0:
            given = f"bag_of_words_depth={self.bag_of_words_depth}"
            raise OfframpError("the last layer whose exit knows words", given, "use 0 (exit 0 only) or a layer, e.g. 2")
        if any(layer < 0 or layer != int(layer) for layer in self.exits):
            raise OfframpError("layers with an exit", f"exits={self.exits}", "use layers from 0, e.g. 0,2,4")

    def layers(self, depth: int) -> list[int]:
        """Return the layers that get an exit head in a model of this depth."""
        if not self.exits:
            return list(range(0 if self.exit0 else 1, depth))
        layers = sorted({int(layer) for layer in self.exits})
        if layers[-1] >= depth:
            given = f"exits={','.join(map(str, layers))} in a model of {depth} layers"
            raise OfframpError("layers with an exit", given, f"use layers from 0 to {depth - 1}")
        return layers


@dataclass(frozen=True)
class JointOptions(ExitOptions):
    """Exits that are trained together with the backbone."""

    mixed: bool = field(default=False, metadata=SINGLE_METHOD_ONLY)  # fine-tune the backbone alone first
    # mixed: exits learn the logits of the fine-tuned model beside the labels
    distil: bool = field(default=True, metadata=SINGLE_METHOD_ONLY)
    # layers get the mean of the gradients of the exits above, not their sum
    equilibrium: bool = field(default=False, metadata=SINGLE_METHOD_ONLY)


@dataclass(frozen=True)
class WeightedOptions(JointOptions):
    """Exits whose losses are summed with fixed weights."""

    weights: Literal["index", "uniform"] = "index"  # index: later exits weigh more, i/Σi


@dataclass(frozen=True)
class ThresholdSettings:
    """Exit where uncertainty is below the threshold; 0 never exits early. `thresholds` (one per exit) replace it."""

    threshold: float = 0.0
    thresholds: tuple[float, ...] = ()
    temperatures: tuple[float, ...] = ()  # each exit's logits are divided by its own

    largest_threshold: ClassVar[float] = 1.0
    threshold_name: ClassVar[str] = "an uncertainty threshold"

    def __post_init__(self) -> None:
        for value in (self.threshold, *self.thresholds):
            if not 0.0 <= value <= self.largest_threshold:
                fix = f"use 0 (never exit early) up to {self.largest_threshold:g}, e.g. 0.3"
                raise OfframpError(self.threshold_name, f"threshold={value}", fix)
        if any(not value > 0.0 for value in self.temperatures):
            raise OfframpError("temperatures of exits", f"{self.temperatures}", "each must be above 0")

    def threshold_of(self, exit_number: int) -> float:
        """Return the uncertainty below which rows exit at the exit of this number, counted from the first exit."""
        return self.thresholds[exit_number] if self.thresholds else self.threshold


@dataclass(frozen=True)
class EntropySettings(ThresholdSettings):
    """Thresholds on entropy in nats."""

    largest_threshold: ClassVar[float] = 20.0
    threshold_name: ClassVar[str] = "an entropy threshold in nats"


class UncertaintyPolicy(Policy):
    """A policy whose rows exit where uncertainty is small; calibration reads it to choose thresholds."""

    def uncertainty(self, layer: int, s: State) -> Tensor:
        """Return how uncertain the exit after this layer is."""  # [rows]
        raise NotImplementedError


class ThresholdPolicy(UncertaintyPolicy):
    """A row exits at the first exit whose uncertainty is below its threshold. Subclasses define the uncertainty."""

    rule_measure: ClassVar[Measure | None] = None  # the name of the measure in exit rules
    reads_rows: bool = False  # thresholds and temperatures come from row columns
    _rule: ExitRule | None = None

    def __init__(self, network: Network, settings: ThresholdSettings) -> None:
        self.task, self.settings = network.task, settings
        self.exit_numbers = {layer: number for number, layer in enumerate(sorted(network.exit_heads))}
        for name in ("thresholds", "temperatures"):
            given: tuple[float, ...] = getattr(settings, name)
            if given and len(given) != len(self.exit_numbers):
                asked = f"one of {name} for each of {len(self.exit_numbers)} exits"
                raise OfframpError(asked, f"{len(given)}", "give as many as there are, or calibrate again")

    def threshold(self, layer: int) -> float:
        """Return the uncertainty below which rows exit after this layer; 0: no row does."""
        return self.settings.threshold_of(self.exit_numbers[layer]) if layer in self.exit_numbers else 0.0

    def needs(self, layer: int) -> Needs:
        """Consult the exits that have a threshold; where rows bring their own, every exit."""
        reads = layer in self.exit_numbers if self.reads_rows else self.threshold(layer) > 0.0
        return Needs(should_exit=reads, logits=reads)

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        """Let rows exit whose uncertainty is below the threshold."""
        if not self.needs(layer).should_exit:
            return None
        if self.reads_rows:
            return self.uncertainty(layer, s) < s.packed.rows[THRESHOLDS][:, self.exit_numbers[layer]]
        return self.uncertainty(layer, s) < self.threshold(layer)

    def rule(self) -> ExitRule | None:
        """Return the policy as data where each row has one distribution and the measure is a known one."""
        if self.rule_measure is None or self.task.kind != "row":
            return None
        if self.rule_measure != "exit_unit" and "several distributions a row" in self.task.provides:
            return None
        if self._rule is not None:  # one object for all batches, so that an engine finds what it prepared for it
            return self._rule
        exits, settings = tuple(self.exit_numbers), self.settings
        thresholds = tuple(settings.threshold_of(number) for number in self.exit_numbers.values())
        self._rule = ExitRule(self.rule_measure, exits, thresholds, settings.temperatures, by_row=self.reads_rows)
        return self._rule

    def row_settings(self) -> dict[str, Tensor]:
        """Return thresholds and temperatures as the columns of one row."""  # [exits] each
        thresholds = [self.settings.threshold_of(number) for number in self.exit_numbers.values()]
        temperatures = self.settings.temperatures or [1.0] * len(self.exit_numbers)
        return {THRESHOLDS: torch.tensor(thresholds), TEMPERATURES: torch.tensor(temperatures)}

    def by_row(self) -> ThresholdPolicy:
        """Return the same policy with thresholds and temperatures read from row columns."""
        policy = copy(self)
        policy.reads_rows, policy._rule = True, None
        return policy

    def reason(self, layer: int, s: State) -> str:
        threshold = self.threshold(layer)
        if threshold == 0.0:
            return ""
        uncertainty = self.uncertainty(layer, s)[0]
        return f"uncertainty {float(uncertainty):.3g} {'<' if bool(uncertainty < threshold) else '≥'} {threshold:.3g}"

    def uncertainty(self, layer: int, s: State) -> Tensor:
        """Return how uncertain the exit after this layer is."""  # [rows]
        packed, logits = s.exit_input(), s.logits()
        if self.rule() is not None and isinstance(s.exit_heads, MeasuringExitHeads):
            assert self.rule_measure is not None, "a rule has a measure"
            return s.exit_heads.uncertainty(self.rule_measure, logits, self._row_temperatures(layer, s))
        if self.reads_rows:
            own = s.packed.rows[TEMPERATURES][:, self.exit_numbers[layer]]
            logits = logits / (own[packed.row_of_token] if s.exit_heads.per_token else own)[:, None]
        elif self.settings.temperatures:
            logits = logits / self.temperature(layer)
        return self.measure(logits, packed)

    def _row_temperatures(self, layer: int, s: State) -> Tensor | None:
        """Return what the logits of each row are divided by; None: nothing."""  # [rows]
        if self.reads_rows:
            return s.packed.rows[TEMPERATURES][:, self.exit_numbers[layer]]
        return torch.full((s.packed.count,), self.temperature(layer)) if self.settings.temperatures else None

    def temperature(self, layer: int) -> float:
        """Return what the logits of this exit are divided by."""
        return self.settings.temperatures[self.exit_numbers[layer]] if self.settings.temperatures else 1.0

    def measure(self, logits: Tensor, packed: Packed) -> Tensor:
        """Return the uncertainty of these logits."""  # [rows]
        raise NotImplementedError


class EntropyPolicy(ThresholdPolicy):
    """Uncertainty is entropy in nats."""

    rule_measure = "entropy"

    def __init__(self, network: Network, settings: ThresholdSettings) -> None:
        super().__init__(network, settings)
        largest, given = math.log(max(2, network.task.outputs)), max(settings.threshold, *settings.thresholds, 0.0)
        if network.task.kind == "row" and given > 1.01 * largest:
            what = f"threshold={given:g}, where {network.task.outputs} labels have at most {largest:.3g}"
            fix = (
                f"use 0 (never exit early) up to {largest:.3g}; a percentage or a share of the maximum is another unit"
            )
            raise OfframpError(settings.threshold_name, what, fix)

    def measure(self, logits: Tensor, packed: Packed) -> Tensor:
        return row_entropy(self.task, logits, packed)


class NormalisedEntropyPolicy(ThresholdPolicy):
    """Uncertainty is entropy as a share of the largest possible."""

    rule_measure = "normalised_entropy"

    def measure(self, logits: Tensor, packed: Packed) -> Tensor:
        return row_normalised_entropy(self.task, logits, packed)


class LeastConfidencePolicy(ThresholdPolicy):
    """Uncertainty is one minus the probability of the best answer."""

    rule_measure = "least_confidence"

    def measure(self, logits: Tensor, packed: Packed) -> Tensor:
        return row_least_confidence(self.task, logits, packed)


def build_exit_heads(network: Network, options: ExitOptions, inner: int = 0) -> nn.ModuleDict:
    """Return an exit head for each layer below the last, and one on the embeddings if `options.exit0`.

    `inner`: units of a hidden layer of every head; 0: linear heads.
    """
    if options.pool not in get_args(Pool):
        raise OfframpError("a pooling for exit heads", repr(options.pool), f"use one of: {', '.join(get_args(Pool))}")
    pool: Pool | None = None if network.per_token else options.pool
    width, outputs = network.encoder.hidden, network.task.outputs
    return build_exit_heads_from(network, options, lambda: ExitHead(width, outputs, pool, inner=inner))


def build_exit_heads_from(network: Network, options: ExitOptions, new_head: Callable[[], nn.Module]) -> nn.ModuleDict:
    """Return exit heads that `new_head` builds, each with a `cost`, within a bag of words where the options say so."""
    task, layers = network.task, [str(layer) for layer in options.layers(network.depth)]
    if task.outputs == 0:  # a vocabulary: every exit shares the model's own head
        return nn.ModuleDict(
            {layer: SharedExitHead(network.model_head.apply, network.model_head.cost) for layer in layers}
        )
    heads = {layer: new_head() for layer in layers}
    if options.bag_of_words and task.kind == "row" and "distribution" in task.provides:
        bag_of_words = FittedBagOfWordsExit if options.bag_of_words_training == "fitted" else BagOfWordsExit
        for layer in [layer for layer in layers if int(layer) <= options.bag_of_words_depth]:
            cost: HeadCost = heads[layer].cost  # type: ignore[assignment]  # a module attribute
            heads[layer] = bag_of_words(heads[layer], cost, network.hf.config.vocab_size, task.outputs)
    return nn.ModuleDict(heads)


def exit_modules(network: Network, options: ExitOptions) -> nn.ModuleDict:
    """Return what most exit methods add: exit heads and nothing else."""
    return nn.ModuleDict({EXIT_HEADS: build_exit_heads(network, options)})


def exit_weights(count: int, rule: Literal["index", "uniform"]) -> list[float]:
    """Return a weight for each of `count` exits, from the first to the last; they sum to 1."""
    weights = [number + 1.0 if rule == "index" else 1.0 for number in range(count)]
    return [weight / sum(weights) for weight in weights]
