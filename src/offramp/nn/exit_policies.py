"""What exits share: their options, their settings, the run-time rule "leave when doubt is small", their heads.

Doubt is whatever a method measures of a row's answer (entropy, hesitation, a learned unit); it is 0 when sure. One
threshold serves all off-ramps, or calibration gives each its own together with a temperature for its logits. An
off-ramp whose threshold is 0 is closed: nobody can leave there, so its head is not even evaluated.
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
from offramp.core.loop import State
from offramp.core.packed import Packed
from offramp.core.policy import Needs, Policy
from offramp.core.rules import ExitRule, Measure
from offramp.errors import OfframpError
from offramp.nn.bag_of_words import BagOfWordsExit, FittedBagOfWordsExit
from offramp.nn.confidence import row_entropy, row_least_confidence, row_normalised_entropy
from offramp.nn.exit_heads import ExitHead, Pool, SharedExitHead
from offramp.nn.network import Network
from offramp.utils.merged_dataclass import SINGLE_METHOD_ONLY

BagOfWordsTraining = Literal["learned", "fitted"]


@dataclass(frozen=True)
class ExitOptions:
    """How exits are built and trained; fixed once trained."""

    pool: Pool = "meanmax"
    exit0: bool = True  # an off-ramp on the embeddings, before any layer
    bag_of_words: bool = (
        True  # first off-ramps of whole-row classes know words and pairs of neighbours (two look-up tables)
    )
    bag_of_words_training: BagOfWordsTraining = (
        "learned"  # tables learn with the off-ramps, or are solved for before (better for long rows)
    )
    bag_of_words_depth: int = 0  # the last layer whose off-ramp knows words, each by tables of its own
    head_lr: float = 2e-3  # fresh heads learn faster than the pretrained body

    def __post_init__(self) -> None:
        if not 0.0 < self.head_lr < 1.0:
            raise OfframpError("a learning rate of heads", f"head_lr={self.head_lr}", "use e.g. 0.002")
        if self.bag_of_words_depth < 0:
            given = f"bag_of_words_depth={self.bag_of_words_depth}"
            raise OfframpError("how deep off-ramps know words", given, "use 0 (off-ramp 0 only) or a layer, e.g. 2")


@dataclass(frozen=True)
class JointOptions(ExitOptions):
    """Exits that train together with the backbone, in stages of their own."""

    mixed: bool = field(default=False, metadata=SINGLE_METHOD_ONLY)  # fine-tune the backbone alone first
    # layers learn from the mean of the exits above, not from their sum
    equilibrium: bool = field(default=False, metadata=SINGLE_METHOD_ONLY)


@dataclass(frozen=True)
class WeightedOptions(JointOptions):
    """Exits whose losses are summed with fixed weights."""

    weights: Literal["index", "uniform"] = "index"  # index: later exits count more, i/Σi


@dataclass(frozen=True)
class ThresholdSettings:
    """Leave when doubt is below the threshold; 0 never leaves early. `thresholds` (one per off-ramp) replace it."""

    threshold: float = 0.0
    thresholds: tuple[float, ...] = ()
    temperatures: tuple[float, ...] = ()  # each off-ramp's logits are divided by its own

    largest_threshold: ClassVar[float] = 1.0
    threshold_name: ClassVar[str] = "a doubt threshold"

    def __post_init__(self) -> None:
        for value in (self.threshold, *self.thresholds):
            if not 0.0 <= value <= self.largest_threshold:
                given = f"threshold={value}"
                raise OfframpError(
                    self.threshold_name, given, f"use 0 (never leave early) up to {self.largest_threshold:g}, e.g. 0.3"
                )
        if any(not value > 0.0 for value in self.temperatures):
            raise OfframpError("temperatures of off-ramps", f"{self.temperatures}", "each must be above 0")

    def threshold_of(self, place: int) -> float:
        """The doubt below which rows leave at the off-ramp at this place in the order of off-ramps."""
        return self.thresholds[place] if self.thresholds else self.threshold


@dataclass(frozen=True)
class EntropySettings(ThresholdSettings):
    """Thresholds on entropy in nats."""

    largest_threshold: ClassVar[float] = 20.0
    threshold_name: ClassVar[str] = "an entropy threshold in nats"


class UncertaintyPolicy(Policy):
    """Rows leave where doubt is small: what calibration needs to know to choose thresholds."""

    def uncertainty(self, layer: int, s: State) -> Tensor:
        """How little the answer after this layer can be trusted."""  # [rows]
        raise NotImplementedError


class ThresholdPolicy(UncertaintyPolicy):
    """A row exits at the first exit whose uncertainty is below its threshold. Subclasses define the uncertainty."""

    rule_measure: ClassVar[Measure | None] = None  # the name of the measure in exit rules
    reads_rows: bool = False  # thresholds and temperatures come from row columns

    def __init__(self, network: Network, settings: ThresholdSettings) -> None:
        self.task, self.settings = network.task, settings
        self.exit_numbers = {layer: place for place, layer in enumerate(sorted(network.exit_heads))}
        for name in ("thresholds", "temperatures"):
            given: tuple[float, ...] = getattr(settings, name)
            if given and len(given) != len(self.exit_numbers):
                asked = f"one of {name} for each of {len(self.exit_numbers)} off-ramps"
                raise OfframpError(asked, f"{len(given)}", "give as many as there are, or calibrate again")

    def threshold(self, layer: int) -> float:
        """The doubt below which rows leave after this layer; 0: nobody does."""
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
        exits, settings = tuple(self.exit_numbers), self.settings
        thresholds = tuple(settings.threshold_of(number) for number in self.exit_numbers.values())
        return ExitRule(self.rule_measure, exits, thresholds, settings.temperatures, by_row=self.reads_rows)

    def row_settings(self) -> dict[str, Tensor]:
        """Return thresholds and temperatures as the columns of one row."""  # [exits] each
        thresholds = [self.settings.threshold_of(number) for number in self.exit_numbers.values()]
        temperatures = self.settings.temperatures or [1.0] * len(self.exit_numbers)
        return {THRESHOLDS: torch.tensor(thresholds, dtype=torch.float64), TEMPERATURES: torch.tensor(temperatures)}

    def by_row(self) -> ThresholdPolicy:
        """Return the same policy with thresholds and temperatures read from row columns."""
        policy = copy(self)
        policy.reads_rows = True
        return policy

    def reason(self, layer: int, s: State) -> str:
        limit = self.threshold(layer)
        if limit == 0.0:
            return ""
        uncertainty = float(self.uncertainty(layer, s)[0])
        return f"uncertainty {uncertainty:.3g} {'<' if uncertainty < limit else '≥'} {limit:.3g}"

    def uncertainty(self, layer: int, s: State) -> Tensor:
        """How little the answer after this layer can be trusted."""  # [rows]
        packed, logits = s.exit_input(), s.logits()
        if self.reads_rows:
            own = s.packed.rows[TEMPERATURES][:, self.exit_numbers[layer]]
            logits = logits / (own[packed.row_of_token] if s.exit_heads.per_token else own)[:, None]
        elif self.settings.temperatures:
            logits = logits / self.temperature(layer)
        return self.measure(logits, packed)

    def temperature(self, layer: int) -> float:
        """What the logits of this off-ramp are divided by."""
        return self.settings.temperatures[self.exit_numbers[layer]] if self.settings.temperatures else 1.0

    def measure(self, logits: Tensor, packed: Packed) -> Tensor:
        """Doubt read off logits."""  # [rows]
        raise NotImplementedError


class EntropyPolicy(ThresholdPolicy):
    """Uncertainty is entropy in nats."""

    rule_measure = "entropy"

    def __init__(self, network: Network, settings: ThresholdSettings) -> None:
        super().__init__(network, settings)
        most, given = math.log(max(2, network.task.outputs)), max(settings.threshold, *settings.thresholds, 0.0)
        if network.task.kind == "row" and given > 1.01 * most:
            what = f"threshold={given:g}, where {network.task.outputs} labels have at most {most:.3g}"
            fix = f"use 0 (never leave early) up to {most:.3g}; a percentage or a share of the maximum is another unit"
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


def build_exit_heads(network: Network, options: ExitOptions) -> nn.ModuleDict:
    """One off-ramp per layer below the last, and one on the embeddings if asked."""
    if options.pool not in get_args(Pool):
        raise OfframpError("a pooling for off-ramps", repr(options.pool), f"use one of: {', '.join(get_args(Pool))}")
    pool: Pool | None = None if network.per_token else options.pool
    return build_exit_heads_from(network, options, lambda: ExitHead(network.encoder.hidden, network.task.outputs, pool))


def build_exit_heads_from(network: Network, options: ExitOptions, head: Callable[[], nn.Module]) -> nn.ModuleDict:
    """Off-ramps that are all made by `head`, which have a `cost`."""
    task, layers = network.task, [str(layer) for layer in range(0 if options.exit0 else 1, network.depth)]
    if task.outputs == 0:  # a vocabulary: every exit shares the model's own head
        return nn.ModuleDict(
            {layer: SharedExitHead(network.model_head.apply, network.model_head.cost) for layer in layers}
        )
    made = {layer: head() for layer in layers}
    if options.bag_of_words and task.kind == "row" and "distribution" in task.provides:
        knowing = FittedBagOfWordsExit if options.bag_of_words_training == "fitted" else BagOfWordsExit
        for layer in [layer for layer in layers if int(layer) <= options.bag_of_words_depth]:
            cost: HeadCost = made[layer].cost  # type: ignore[assignment]  # a module attribute
            made[layer] = knowing(made[layer], cost, network.hf.config.vocab_size, task.outputs)
    return nn.ModuleDict(made)


def exit_modules(network: Network, options: ExitOptions) -> nn.ModuleDict:
    """What most exit methods add: off-ramps and nothing else."""
    return nn.ModuleDict({"exit_heads": build_exit_heads(network, options)})


def exit_weights(count: int, rule: Literal["index", "uniform"]) -> list[float]:
    """One weight for each of `count` exits, the first first, summing to 1."""
    raw = [place + 1.0 if rule == "index" else 1.0 for place in range(count)]
    return [w / sum(raw) for w in raw]
