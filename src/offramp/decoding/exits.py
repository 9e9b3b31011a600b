"""Exits of decoders (Elbayad et al. 2020): how the number of blocks of a target token is decided.

Four forms: the exit's own confidence (nothing is added), a unit that reads the source and plans one depth for a whole
sentence (sequence), a unit that reads a token after the first block and plans its depth (multinomial), and a unit that
decides after every block whether to stop (geometric-like). Each gives an uncertainty from 0 (certain) to 1: one minus
the largest probability, the probability that a greater depth is needed, or the probability of not stopping. A token
exits at the first block whose uncertainty is below the threshold; there is one threshold, or one per block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from offramp.core.cost import HeadCost
from offramp.core.policy import Policy
from offramp.decoding.decoder import decoder_of, halting_unit, vocabulary_heads
from offramp.decoding.teacher_forcing import TeacherForced
from offramp.errors import OfframpError
from offramp.nn.exit_oracles import GeometricExitUnit, MultinomialExitUnit, NeverRight
from offramp.nn.keys import HALTING_UNIT, VOCABULARIES
from offramp.nn.network import Network


@dataclass(frozen=True)
class DecoderOptions:
    """How exits and the units that choose among them are built and trained; fixed once trained."""

    form: Literal["multinomial", "geometric", "threshold", "sequence"] = "geometric"  # sequence: decoders only
    oracle: Literal["correctness", "likelihood"] = "likelihood"
    never_right: NeverRight = "last"  # correctness: the exit of what no exit gets right; first: the paper's
    penalty: float = 0.1  # λ: what one more layer must improve
    sigma: float = 0.0  # smoothing over neighbouring tokens; 0: none
    training: Literal["aligned", "mixed"] = "aligned"
    samples: int = 3  # mixed: exit sequences drawn for a batch
    alpha: float = 1.0  # weight of the units' loss
    detach: bool = False  # the units' loss does not train the model
    together: bool = False  # units learn from the start, in one stage
    weights: Literal["index", "uniform"] = "uniform"
    tied: bool = False  # decoders: all exits share the model's vocabulary; else each below the last has its own
    smoothing: float = 0.1  # decoders: label smoothing
    head_lr: float = 2e-3

    def __post_init__(self) -> None:
        for name, valid, fix in (
            ("penalty", self.penalty >= 0.0, "0 or more, e.g. 0.1"),
            ("sigma", self.sigma >= 0.0, "0 or more, e.g. 1"),
            ("samples", self.samples >= 1, "1 or more"),
            ("alpha", self.alpha > 0.0, "a number above 0, e.g. 1"),
            ("smoothing", 0.0 <= self.smoothing < 1.0, "0 up to below 1, e.g. 0.1"),
            ("head_lr", 0.0 < self.head_lr < 1.0, "e.g. 0.002"),
        ):
            if not valid:
                raise OfframpError("options of depth_adaptive", f"{name}={getattr(self, name)}", f"use {fix}")


@dataclass(frozen=True)
class DecoderSettings:
    """Exit where the uncertainty about stopping is below the threshold; 0 never exits early."""

    threshold: float = 0.0
    argmax: bool = False  # multinomial, sequence: exit at the likeliest depth, whatever the threshold
    thresholds: tuple[float, ...] = ()  # decoders: one for every block but the last, in place of the one
    depth: int = 0  # decoders: every token exits after this block; 0: the exits decide
    beams: int = 0  # decoders: hypotheses; 0: as many as the model's generation configuration has

    def __post_init__(self) -> None:
        for value in (self.threshold, *self.thresholds):
            if not 0.0 <= value <= 1.0:
                given, fix = f"threshold={value}", "use 0 (never exit early) up to 1, e.g. 0.5"
                raise OfframpError("a threshold on the uncertainty about stopping", given, fix)
        for name in ("depth", "beams"):
            if getattr(self, name) < 0:
                raise OfframpError(f"a number of {name}", f"{name}={getattr(self, name)}", "use 0 (as it is), 1, 2, …")


class SentenceUnit(MultinomialExitUnit):
    """A softmax over depths that reads the mean of the source once."""

    def __init__(self, hidden: int, depth: int) -> None:
        super().__init__(hidden, depth)
        self.cost = HeadCost(hidden * depth, 0)


def decoder_modules(network: Network, options: DecoderOptions) -> nn.ModuleDict:
    """Return the unit that decides, and vocabulary projections of the exits where they do not share one."""
    decoder = decoder_of(network)
    modules = nn.ModuleDict()
    if options.form == "sequence":
        modules[HALTING_UNIT] = SentenceUnit(decoder.hidden, decoder.depth)
    elif options.form == "multinomial":
        modules[HALTING_UNIT] = MultinomialExitUnit(decoder.hidden, decoder.depth)
    elif options.form == "geometric":
        modules[HALTING_UNIT] = GeometricExitUnit(decoder.hidden, decoder.depth)
    if not options.tied:
        names = [str(block) for block in range(1, decoder.depth)]
        modules[VOCABULARIES] = nn.ModuleDict({name: nn.Linear(decoder.hidden, decoder.vocabulary) for name in names})
    return modules


class FixedDepth(Policy):
    """Every token exits after the same block."""

    free: ClassVar[bool] = True

    def __init__(self, depth: int, beams: int = 0) -> None:
        self.depth, self.beams = depth, beams

    def sentence_depths(self, source: Tensor) -> Tensor | None:
        return torch.full((source.shape[0],), self.depth)


class DecoderThresholdPolicy(Policy):
    """Thresholds on an uncertainty per block; subclasses define the uncertainty."""

    def __init__(self, network: Network, settings: DecoderSettings) -> None:
        self.depth, self.beams, self.argmax = network.depth, settings.beams, settings.argmax
        self.unit = halting_unit(network)
        if settings.thresholds and len(settings.thresholds) != self.depth - 1:
            asked = f"one threshold for each of {self.depth - 1} blocks below the last"
            raise OfframpError(asked, f"{len(settings.thresholds)}", "give as many as there are, or calibrate again")
        self.thresholds = settings.thresholds or (settings.threshold,) * (self.depth - 1)

    def softmax_depths(self, unit: MultinomialExitUnit, states: Tensor) -> Tensor | None:
        """Return depths chosen by a unit with a softmax over them."""
        if self.argmax:
            likeliest: Tensor = unit(states).argmax(1)
            return likeliest + 1
        if not any(self.thresholds):
            return None
        return first_below(needs_more_than(unit(states)).T, torch.tensor(self.thresholds, device=states.device))


class SequencePolicy(DecoderThresholdPolicy):
    """Plans whole sentences from the mean of the source."""

    def sentence_depths(self, source: Tensor) -> Tensor | None:
        assert isinstance(self.unit, SentenceUnit)
        return self.softmax_depths(self.unit, source)


class MultinomialPolicy(DecoderThresholdPolicy):
    """Plans the depth of a token after the first block."""

    def token_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        assert isinstance(self.unit, MultinomialExitUnit)
        return self.softmax_depths(self.unit, states) if block == 1 else None


class GeometricPolicy(DecoderThresholdPolicy):
    """Decides after every block whether to stop."""

    def __init__(self, network: Network, settings: DecoderSettings) -> None:
        super().__init__(network, settings)
        assert isinstance(self.unit, GeometricExitUnit)
        weight, bias = self.unit.project.weight.detach(), self.unit.project.bias.tolist()
        rows = [0 if self.unit.shared else place for place in range(self.depth - 1)]
        logits = [math.log((1.0 - t) / t) if t > 0.0 and t < 1.0 else -math.inf for t in self.thresholds]
        # 1 − sigmoid(w·x + b) < t as a comparison of w·x alone: one product a block, no sigmoid
        self.stop_rules = [(weight[row], logit - bias[row]) for row, logit in zip(rows, logits, strict=True)]

    def token_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        if self.thresholds[block - 1] == 0.0:
            return None
        weight, least = self.stop_rules[block - 1]
        return torch.where(torch.mv(states, weight) > least, block, self.depth)


class ConfidencePolicy(DecoderThresholdPolicy):
    """Exits where the exit's own largest probability is high enough."""

    def token_depths(self, block: int, states: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        if self.thresholds[block - 1] == 0.0:
            return None
        return torch.where(least_confidence(logits()) < self.thresholds[block - 1], block, self.depth)


def decoder_policy(network: Network, settings: DecoderSettings) -> Policy:
    """Return the policy for the unit that the network has."""
    if settings.depth:
        if settings.depth > network.depth:
            raise OfframpError("a depth", f"depth={settings.depth}", f"this model has {network.depth} blocks")
        return FixedDepth(settings.depth, settings.beams)
    unit = halting_unit(network)
    if settings.argmax and not isinstance(unit, MultinomialExitUnit):
        given = "argmax=true for exits that decide block by block"
        raise OfframpError("the likeliest depth", given, "use form=multinomial or sequence, or a threshold")
    if isinstance(unit, GeometricExitUnit):
        return GeometricPolicy(network, settings)
    if isinstance(unit, SentenceUnit):
        return SequencePolicy(network, settings)
    return MultinomialPolicy(network, settings) if unit is not None else ConfidencePolicy(network, settings)


def least_confidence(logits: Tensor) -> Tensor:
    """Return one minus the largest probability: [n, vocabulary] → [n]."""
    return 1.0 - (logits.amax(-1) - logits.logsumexp(-1)).exp()


def needs_more_than(logits: Tensor) -> Tensor:
    """Return the probability of needing more than each depth but the last: [n, depths] → [n, depths − 1]."""
    return (1.0 - logits.float().softmax(-1).cumsum(-1)[:, :-1]).clamp(min=0.0)


def first_below(uncertainty: Tensor, thresholds: Tensor) -> Tensor:
    """Return the first block whose uncertainty is below its threshold, else the last.

    [blocks − 1, n], [blocks − 1] → depths [n].
    """
    blocks = torch.arange(1, uncertainty.shape[0] + 1, device=uncertainty.device)[:, None]
    return torch.where(uncertainty < thresholds[:, None], blocks, uncertainty.shape[0] + 1).amin(0)


def threshold_of_average_exit(uncertainty: Tensor, average: float) -> float:
    """Return the one threshold for all blocks at which tokens exit, on average, nearest to this block.

    `uncertainty` [blocks − 1, tokens] is that of teacher-forced tokens. The average falls as the threshold rises, so
    that halving an interval of the values that occur finds it.
    """
    values = torch.cat((uncertainty.new_zeros(1), uncertainty.flatten().sort().values, uncertainty.new_ones(1)))

    def average_at(index: int) -> float:
        limits = values[index].expand(uncertainty.shape[0])
        return float(first_below(uncertainty, limits).double().mean())

    low, high = 0, len(values) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if average_at(middle) > average else (low, middle)
    return float(values[min((low, high), key=lambda index: abs(average_at(index) - average))].clamp(0.0, 1.0))


def block_uncertainties(network: Network, forced: TeacherForced) -> Tensor:
    """Return the uncertainty of every teacher-forced token after every block but the last: [blocks − 1, tokens]."""
    unit = halting_unit(network)
    below = forced.states[:-1]
    if isinstance(unit, GeometricExitUnit):
        return torch.stack([1.0 - unit(place, states).float().sigmoid() for place, states in enumerate(below)])
    if isinstance(unit, SentenceUnit):
        per_sentence = needs_more_than(unit(forced.source.mean()))
        return per_sentence.repeat_interleave(forced.lengths.to(network.device), 0).T
    if unit is not None:
        return needs_more_than(unit(below[0])).T
    heads = zip(vocabulary_heads(network), below, strict=False)
    return torch.stack([least_confidence(head(states).float()) for head, states in heads])
